"""How samples are dealt out to clients; one file per partitioner."""

from fedloom.data.partition.base import Deal, Labels, Partitioner, partition, partitioners

__all__ = ["Deal", "Labels", "Partitioner", "partition", "partitioners"]
