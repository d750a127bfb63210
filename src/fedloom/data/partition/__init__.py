"""How samples are dealt out to clients; one file per partitioner."""

from fedloom.data.partition.base import Deal, Partitioner, Pool, partition, partitioners
from fedloom.data.partition.report import PartitionReport

__all__ = ["Deal", "PartitionReport", "Partitioner", "Pool", "partition", "partitioners"]
