"""Hashes of tensors: whether two places hold the same weights, without bringing them together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.weights.publication import WeightPublication
from penstock.weights.site import site_of
from penstock.weights.transports.opening import open_weights


def tensor_digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """A hash of every tensor's dtype, shape and bytes, by name; memory layout and device do not matter."""
    return {name: _digest(tensor) for name, tensor in tensors}


def published_digests(publication: WeightPublication) -> dict[str, str]:
    """The hashes of published weights, as this process reads them."""
    opened = open_weights(publication, site_of())
    try:
        return tensor_digests(opened.tensors())
    finally:
        opened.close()


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    digest.update(content.numpy().data)
    return digest.hexdigest()
