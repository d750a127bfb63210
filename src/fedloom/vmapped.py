"""What `vmap` holds of a cohort, laid out for a kernel that takes all clients at once."""

from torch import Tensor


def joined(rows: int, in_dims: tuple[int | None, ...], x: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
    """What `vmap` holds of x [B, K, ...] and of tensors [K, ...], its rows and the axis K as one."""
    first, *others = in_dims
    x = x.unsqueeze(1).expand(-1, rows, *x.shape[1:]) if first is None else x.movedim(first, 1)
    held = [
        values.expand(rows, *values.shape) if at is None else values.movedim(at, 0)
        for values, at in zip(own, others, strict=True)
    ]
    return x.flatten(1, 2), *(values.flatten(0, 1) for values in held)
