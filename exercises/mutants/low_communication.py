"""Wrong implementations of what sends less."""

from exercises.mutants import mutant

AVERAGING = "tests/low_communication/test_averaging.py::"
COMPRESSED = "tests/low_communication/test_compressed.py::"
IDENTITY = COMPRESSED + "test_what_is_sent_and_what_remains_are_the_gradient_and_what_remained"

mutant(
    "compressed_error_added_twice",
    "With top-k the loss falls slowly, and later diverges: what remained is kept a second time.",
    target="low_communication.train_compressed.CompressedDataParallel._average",
    changes={"= gradient.sub_(sent)": "= gradient.sub_(sent) + self.remaining.get(bucket, 0)"},
    killer=IDENTITY,
)

mutant(
    "compressed_error_dropped",
    "Most weights hardly move with top-k: what has not been sent is kept, but never added to a gradient.",
    target="low_communication.train_compressed.CompressedDataParallel._average",
    changes={"if bucket in self.remaining:\n    bucket.flat += self.remaining[bucket]": ""},
    killer=IDENTITY,
)

mutant(
    "compressed_error_of_the_mean",
    "With top-k each rank sends the same numbers again and again: the error is that of the mean over ranks.",
    target="low_communication.train_compressed.CompressedDataParallel._average",
    changes={"gradient.sub_(sent)": "gradient.sub_(bucket.flat)"},
    killer=IDENTITY,
)

mutant(
    "int8_scales_of_rank_0",
    "The mean is wrong where ranks have gradients of different sizes: all are scaled as rank 0's.",
    target="low_communication.compressors.Int8.mean",
    changes={
        "my_mean = unpack(chunks).view(self.ranks, -1, BLOCK).mean(0)": (
            "by_rank = chunks.view(self.ranks, -1, ROW)\n"
            "by_rank[1:, :, BLOCK:] = by_rank[:1, :, BLOCK:]\n"
            "my_mean = unpack(chunks).view(self.ranks, -1, BLOCK).mean(0)"
        ),
    },
    killer=COMPRESSED + "test_int8_rounds_by_at_most_half_a_scale_of_the_ranks_own_block",
)

mutant(
    "powersgd_of_an_overflow",
    "After an overflow all gradients are NaN: the next step begins with the matrices that it has left.",
    target="low_communication.compressors.PowerSGD.restore",
    changes={"self.qs = snapshot": "pass"},
    killer=COMPRESSED + "test_a_step_that_overflows_on_one_rank_is_lost_and_no_other",
    symptom="With PowerSGD and a GradScaler no step is ever taken again after the first overflow.",
)

mutant(
    "powersgd_not_orthonormal",
    "With PowerSGD gradients soon are not finite: P's columns are not orthonormal, so P Q^T is far from M.",
    target="low_communication.compressors.PowerSGD.mean",
    changes={"ps = {i: orthonormal(p) for i, p in ps.items()}": ""},
    killer=COMPRESSED + "test_powersgd_is_exact_if_the_mean_has_few_dimensions_and_for_zeros",
)

mutant(
    "topk_at_a_ranks_own_places",
    "With top-k the replicas drift apart: a rank adds the others' numbers at the places of its own.",
    target="low_communication.compressors.TopK.mean",
    changes={"its_places.long()": "places"},
    killer=COMPRESSED + "test_topk_sends_the_largest_numbers_of_each_rank",
)

mutant(
    "topk_places_summed",
    "Top-k fails with an index that is out of range: an all-reduce adds up places as it does numbers.",
    target="low_communication.compressors.TopK.mean",
    changes={
        "places.int(), flat[places].float().view(torch.int32)": "places.float(), flat[places].float()",
        "full = mine.new_empty(self.ranks, 2, self.k)": "full = mine[None]",
        "all_gather(full.view(-1), mine.view(-1), self.group)": "all_reduce(mine, group=self.group)",
    },
    killer=COMPRESSED + "test_topk_sends_the_largest_numbers_of_each_rank",
    symptom="Top-k trains on one rank, and on several it fails with an index that is out of range.",
    fails_with="index out of range",
)

mutant(
    "local_state_reset",
    "The losses are not those of torch's averager: each average throws the optimizer's state away.",
    target="low_communication.train_local_sgd.LocalSGD.average",
    changes={"self.steps = 0": "self.steps = 0\noptimizer.state.clear()"},
    killer=AVERAGING + "test_two_ranks_equal_workers_in_one_process[local SGD]",
    symptom="The replicas are equal, but the losses are not those of torch's averager.",
)

mutant(
    "diloco_anchor_before_a_load",
    "Weights that are loaded after wrapping are overshot: the anchor is still that of the weights before.",
    target="training.loads._before_load",
    changes={
        'if not getattr(wrapper, "takes_loads", True):': (
            "if not hasattr(wrapper, 'restart'):\n    return\nif False:"
        )
    },
    killer=AVERAGING + "test_diloco_refuses_to_load_after_wrapping_as_its_anchor_would_stay_behind",
    fails_with="DID NOT RAISE",
)

mutant(
    "diloco_finishes_after_other_numbers_of_steps",
    "Replicas end unequal without a word: one rank has taken more steps than the others.",
    target="training.guard.refuse_unequal_steps",
    changes={"if len(set(steps)) > 1:": "if False:"},
    killer=AVERAGING
    + "test_streaming_diloco_refuses_to_finish_where_ranks_have_taken_other_numbers_of_steps",
    fails_with="DID NOT RAISE",
)

mutant(
    "diloco_sign_of_the_change",
    "The loss rises: the ranks' change has the other sign, so the outer optimizer goes back.",
    target="low_communication.train_diloco_plain.DiLoCo.outer_step",
    changes={"change = self.anchor - self.flat()": "change = self.flat() - self.anchor"},
    killer=AVERAGING + "test_an_outer_rate_of_1_without_momentum_is_local_sgd",
)

mutant(
    "diloco_sum_of_the_changes",
    "The more ranks there are, the farther an outer step goes: it takes the sum of the ranks' changes.",
    target="low_communication.train_diloco_plain.DiLoCo.outer_step",
    changes={'all_reduce(change, "mean", self.group)': 'all_reduce(change, "sum", self.group)'},
    killer=AVERAGING + "test_the_mean_is_over_the_ranks_of_a_group[DiLoCo]",
    symptom="With several ranks the loss rises after each outer step, and on one rank it falls.",
)

mutant(
    "diloco_momentum_on_one_rank",
    "The replicas are not equal after the last step: only rank 0 keeps the outer momentum.",
    target="low_communication.train_diloco.AnchoredParameters.outer_step",
    changes={
        "self.momentum.mul_(outer_momentum).add_(change)": (
            "kept = outer_momentum if torch.distributed.get_rank() == 0 else 0.0\n"
            "self.momentum.mul_(kept).add_(change)"
        ),
    },
    killer=AVERAGING + "test_two_ranks_equal_workers_in_one_process[streaming DiLoCo]",
)

mutant(
    "diloco_fragments_in_another_order",
    "Parameters are averaged with other parameters: each rank begins its round with another fragment.",
    target="low_communication.train_diloco.StreamingDiLoCo.__init__",
    changes={"due = (i + 1) * sync_every": "due = (i + 1 + torch.distributed.get_rank(group)) * sync_every"},
    killer=AVERAGING + "test_a_fragment_is_averaged_with_the_same_one_of_the_other_ranks",
    symptom="With fragments the ranks stop, because their messages have different sizes. With fragments of "
    "equal size they go on, and the parameters are wrong.",
)

mutant(
    "diloco_learned_meanwhile_lost",
    "With a delay the loss falls more slowly: the new anchor replaces what was learned while it travelled.",
    target="low_communication.train_diloco.StreamingDiLoCo._receive",
    changes={"fragment.flat() + (fragment.anchor - sent_parameters)": "fragment.anchor"},
    killer=AVERAGING + "test_two_ranks_equal_workers_in_one_process[streaming DiLoCo]",
    symptom="The longer the delay is, the more slowly the loss falls.",
)

ELASTIC = "tests/low_communication/test_elastic_diloco.py::"
ONE_COMES_BACK = ELASTIC + "test_a_worker_that_comes_back_copies_the_anchor_and_trains_from_the_next_round_on"

mutant(
    "elastic_diloco_newcomer_without_momentum",
    "The replicas differ after a worker has come back: it has the others' anchor, but no outer momentum.",
    target="low_communication.train_elastic_diloco.Worker.catch_up",
    changes={"self.all.anchor, self.all.momentum = state": "self.all.anchor = state[0]"},
    killer=ONE_COMES_BACK,
    symptom="The replicas are equal at the end, unless a worker has come back.",
)

mutant(
    "elastic_diloco_mean_over_the_dead",
    "After a death each round moves the anchor less: the sum is divided by the workers of the start.",
    target="low_communication.train_elastic_diloco.Worker.synchronise",
    changes={
        "change, loss = flat[:-2] / workers, flat[-2] / workers": (
            "self.all_workers = getattr(self, 'all_workers', workers)\n"
            "change, loss = flat[:-2] / self.all_workers, flat[-2] / workers"
        ),
    },
    killer=ONE_COMES_BACK,
    symptom="After a death the replicas stay equal, but the loss falls more slowly.",
)

mutant(
    "elastic_diloco_examples_by_rank",
    "After a death a worker trains on the dead one's examples: a rank in the new group is no worker's name.",
    target="low_communication.train_elastic_diloco.main",
    changes={"rank_slice(part, survivors.name, ranks)": "rank_slice(part, survivors.cluster.rank, ranks)"},
    killer=ELASTIC + "test_after_two_deaths_the_mean_is_over_those_who_are_left",
    symptom="Training goes on after a death, but workers have other examples than before.",
)

HSDP = "tests/low_communication/test_hsdp.py::"

mutant(
    "hsdp_keeps_a_microbatch_that_is_given_up",
    "A microbatch that was given up is learned in the next step: its gradients are not where zero_grad() is.",
    target="low_communication.train_hsdp.HybridShardedDataParallel._keep",
    changes={
        "super()._keep(unit, mine)": (
            "mine = mine + unit.__dict__.pop('partial', 0)\n"
            "if not self.require_backward_grad_sync:\n"
            "    unit.partial = mine\n"
            "    return\n"
            "super()._keep(unit, mine)"
        )
    },
    killer="tests/test_wrappers.py::test_a_microbatch_or_a_step_that_is_given_up_leaves_no_trace[hsdp]",
)

mutant(
    "hsdp_groups_swapped",
    "Hybrid sharding is slower than ZeRO 3: parameters are gathered from other machines.",
    target="low_communication.train_hsdp.machine_groups",
    changes={
        'return own_group(machines, "shards"), own_group(same_shard, "replicas")': (
            'return own_group(same_shard, "shards"), own_group(machines, "replicas")'
        ),
    },
    killer=HSDP + "test_parameters_and_their_gathers_stay_on_a_machine",
    symptom="Hybrid sharding trains right, but is slower than ZeRO 3 on a slow network.",
)
