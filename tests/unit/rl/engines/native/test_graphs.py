"""Steps of fixed shapes: on this CPU as they are written, on an emulated GPU as CUDA graphs."""

import json

import pytest
import torch

from mcore_rl.errors import ConfigError
from mcore_rl.megatron.batch_invariant import InvariantProducts
from mcore_rl.megatron.mesh import Mesh
from mcore_rl.rl.engines.base import Sampling
from mcore_rl.rl.engines.native.decoder import Bucket, NextToken, StaticDecode
from mcore_rl.rl.engines.native.engine import MegatronEngine
from mcore_rl.rl.sampling import Cut
from mcore_rl.rl.types import Completion
from tests.emulated_machine import emulated
from tests.generating import loaded, ragged_prompts, spelled
from tests.hf_models import VOCAB, oracle
from tests.sections import engine_config

SAMPLING = Sampling(max_new_tokens=10, cut=Cut(temperature=0.7, top_k=30, min_p=0.01), with_routes=True)
SIZES = engine_config(slots=5, step_tokens=16)


def both_ways(case: str, mesh: Mesh) -> list[tuple[Completion, Completion]]:
    """The same completions by steps of any shape, and of fixed ones."""
    theirs = oracle(case)
    chunks, prompts = loaded(theirs.ours, theirs.tensors, mesh), ragged_prompts(6, VOCAB)
    ways = []
    for is_fixed in (False, True):
        engine = MegatronEngine(chunks, mesh, theirs.ours, spelled, SIZES, has_fixed_shapes=is_fixed)
        groups = engine.generate(prompts, SAMPLING, [[1, 2]] * len(prompts))
        ways.append([one for group in groups for one in group.completions])
    return list(zip(*ways, strict=True))


@pytest.mark.matrix("deepseek_v3")
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_steps_of_fixed_shapes_give_the_same_completions(case: str, one_rank: Mesh) -> None:
    for usual, fixed in both_ways(case, one_rank):
        assert fixed.tokens_T == usual.tokens_T
        assert fixed.experts_TLK is not None and usual.experts_TLK is not None
        assert torch.equal(fixed.experts_TLK, usual.experts_TLK)
        # Products of more rows, and sums over more keys, round otherwise.
        assert fixed.logprobs_T == pytest.approx(usual.logprobs_T, abs=1e-5)
        assert fixed.kept_logprobs_T == pytest.approx(usual.kept_logprobs_T, abs=1e-5)


@pytest.mark.full
def test_where_products_do_not_depend_on_other_rows_they_are_equal_in_every_bit(one_rank: Mesh) -> None:
    with InvariantProducts():
        for usual, fixed in both_ways("qwen3_moe", one_rank):
            assert fixed.logprobs_T == usual.logprobs_T and fixed.tokens_T == usual.tokens_T


def test_buckets_are_powers_of_two_up_to_the_slots_and_the_longest() -> None:
    decode = StaticDecode(lambda *_: torch.zeros(0), 48, 700, torch.device("cpu"), captures=False)

    def bucket(count: int, position: int) -> Bucket:
        return decode.bucket([NextToken(0, slot, position, 0) for slot in range(count)])

    assert bucket(1, 0) == (1, 128) and bucket(3, 127) == (4, 128) and bucket(4, 128) == (4, 256)
    assert bucket(33, 511) == (48, 512) and bucket(48, 699) == (48, 700)


def test_rows_that_fill_a_bucket_up_go_to_the_slot_that_nobody_has() -> None:
    seen = []

    def compute(tokens, drawing_B, seeds_B):  # type: ignore[no-untyped-def]
        seen.append((tokens.ids_T.tolist(), tokens.slots_T.tolist(), tokens.positions_T.tolist(), seeds_B.tolist()))
        return torch.stack([tokens.ids_T.double()] * 4)

    decode = StaticDecode(compute, 4, 512, torch.device("cpu"), captures=False)
    assert decode.step([NextToken(7 + slot, slot, 3, 5) for slot in range(4)]).shape == (4, 4)
    drawn_4B = decode.step([NextToken(20 + slot, slot, 9, 6) for slot in range(3)])
    assert seen[1] == ([20, 21, 22, 0], [0, 1, 2, -1], [9, 9, 9, 0], [6, 6, 6, 0])
    assert drawn_4B.tolist() == [[20, 21, 22]] * 4


def test_graphs_that_are_asked_for_without_a_gpu_are_refused(one_rank: Mesh) -> None:
    theirs = oracle("qwen3_moe")
    chunks = loaded(theirs.ours, theirs.tensors, one_rank)
    wanted = SIZES.model_copy(update={"cuda_graphs": True})
    with pytest.raises(ConfigError, match=r"rl\.engine\.cuda_graphs=true, but there is no GPU"):
        MegatronEngine(chunks, one_rank, theirs.ours, spelled, wanted)
    assert MegatronEngine(chunks, one_rank, theirs.ours, spelled, SIZES).why_no_graphs == "there is no GPU"


@pytest.mark.full
def test_on_an_emulated_gpu_graphs_replay_the_steps_and_the_host_waits_once_a_step() -> None:
    done = emulated("cuda", "tests.emulated_decode:rollouts")
    assert done.returncode == 0, done.stderr[-3000:]
    families = json.loads(done.stdout.splitlines()[-1])
    # Sums of 700 numbers of up to 1 in float64.
    assert families.pop("running_sum_difference") <= 1e-12
    for family, found in families.items():
        assert found["tokens_are_equal"] and found["routes_are_equal"] and found["logprobs_are_equal"], family
        assert len(found["replays"]) >= 2 and sum(found["replays"]) >= 12, found["replays"]
        assert found["other_memory_is_the_same"]
        # A wait inside a capture would have been an error; torch waits once before each.
        steps = found["plain_waits"]["engine.py:_read"]
        routes = {"decoder.py:routes": found["completions"]}
        assert found["plain_waits"] == {"engine.py:_read": steps} | routes
        assert found["waits"] == {"engine.py:_read": steps, "decoder.py:_captured": len(found["replays"])} | routes
