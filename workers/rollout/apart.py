"""The rollout role in a pool of its own: the weights come over from the actor's pool."""

from collections.abc import Iterable

import torch
from torch import Tensor

from config.schema import ActorRolloutRefConfig
from trainer.batch import PPOBatch
from workers.engine.fsdp import DeviceContext
from workers.engine.models import PolicySpec
from workers.rollout.buckets import Bucket, WeightInbox
from workers.rollout.sampling import RolloutRequest
from workers.rollout.worker import Rollout


class RolloutApart:
    """One rank of the rollout role. A push is `open_weights`, `take_weights` for each bucket, `close_weights`."""

    def __init__(self, context: DeviceContext, config: ActorRolloutRefConfig, spec: PolicySpec) -> None:
        self.device = context.device
        self.rollout = Rollout(context, config, spec)
        self._inbox: WeightInbox | None = None

    def open_weights(self) -> None:
        """Begin to take weights."""
        self._inbox = WeightInbox(self._load)

    def take_weights(self, bucket: Bucket) -> None:
        """Take some of them."""
        assert self._inbox is not None, "take_weights before open_weights"
        self._inbox.put(bucket)

    def close_weights(self) -> None:
        """Wait until the sampler has them all."""
        assert self._inbox is not None, "close_weights before open_weights"
        self._inbox.close()
        self._inbox = None

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        self.rollout.load_weights(weights)

    def generate(self, batch: PPOBatch, request: RolloutRequest) -> dict[str, Tensor]:
        """What `Rollout.generate` says."""
        return self.rollout.generate(batch, request)
