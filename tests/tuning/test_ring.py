"""What FSDP2 gathers in a backward that ends at a frozen layer, where ranks share the sequences, against torch."""

from __future__ import annotations

import pytest
from tuning.split import validate
from validate.test_fake import LLAMA, same


@pytest.mark.slow
def test_layers_before_the_last_frozen_one_are_not_gathered_again() -> None:
    fields = LLAMA | {"num_hidden_layers": 5}
    same(validate(fields, gpus=4, cp=2, zero=3, micro_batch_size=2, seq_len=64, freeze="embeddings,first:3"))
