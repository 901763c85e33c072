"""Storages of tensors are followed until their last tensor is gone."""

from __future__ import annotations

import torch

from trainwright.planning.trace.record import Storages


def test_views_share_a_storage_and_the_last_of_them_releases_it() -> None:
    live: list[int] = []
    storages = Storages(lambda _, size: live.append(-size), block=512)
    tensor = torch.empty(200)
    view = tensor[:10]
    live.append(storages.follow(tensor.untyped_storage()))
    live.append(storages.follow(view.untyped_storage()))
    del tensor
    assert live == [1024, 0]
    del view
    assert live == [1024, 0, -1024]


def test_a_resized_storage_counts_as_it_is_now() -> None:
    released: list[int] = []
    storages = Storages(lambda _, size: released.append(size))
    storage = torch.empty(100).untyped_storage()
    assert storage not in storages and storages.follow(storage) == 400
    storage.resize_(0)
    assert storage in storages and storages.follow(storage) == -400
    storage.resize_(800)
    assert storages.follow(storage) == 800
    del storage
    assert released == [800]


def test_existing_and_forgotten_storages_are_not_counted() -> None:
    released: list[int] = []
    existing, gradient = torch.empty(10), torch.empty(20)
    storages = Storages(lambda _, size: released.append(size), [existing.untyped_storage()])
    assert storages.follow(existing.untyped_storage()) == 0
    assert storages.forget(gradient.untyped_storage()) == 0
    assert storages.follow(gradient.untyped_storage()) == 80
    assert storages.forget(gradient.untyped_storage()) == 80
    assert storages.forget(gradient.untyped_storage()) == storages.follow(gradient.untyped_storage()) == 0
    del existing, gradient
    assert released == []
