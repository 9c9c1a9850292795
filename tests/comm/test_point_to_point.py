"""Messages between two ranks arrive in order, and a ring that sends first never ends."""

import itertools

import pytest
import torch

from comm import collectives, point_to_point
from comm.cost import Link
from comm.point_to_point import irecv, isend
from comm.wire import slow_link
from comm.wire.transport import use_transport
from comm.wire.wire import Wire
from lab.ranks import RankError, run_ranks


def test_a_ring_that_sends_first_never_ends_and_the_report_shows_where_each_rank_is_stuck():
    def ring(cluster) -> None:
        point_to_point.ring_send_first(torch.ones(10), torch.empty(10))

    with pytest.raises(RankError) as error:
        run_ranks(ring, 3, timeout=60, look_every=0.3)
    _, *parts = str(error.value).split(" is stuck ")
    assert len(parts) == 3
    for part in parts:
        assert "in wait: " in part
        assert "ring_send_first" in part
        assert "other thread" not in part


@pytest.mark.parametrize("ring", [point_to_point.ring_even_odd, point_to_point.ring_non_blocking])
def test_both_cures_bring_every_tensor_to_the_right_neighbour(ring):
    def turn(cluster) -> list[float]:
        got = []
        for numel in (1, 300_000):
            incoming = torch.empty(numel)
            ring(torch.full((numel,), float(cluster.rank)), incoming)
            assert (incoming == incoming[0]).all()
            got.append(incoming[0].item())
        return got

    for n in (2, 3):
        assert run_ranks(turn, n) == [[(rank - 1) % n] * 2 for rank in range(n)]


def test_messages_and_collectives_do_not_take_each_others_data():
    def both(cluster) -> None:
        r = cluster.rank
        for collective in (collectives.all_reduce, collectives.broadcast):
            mail, tensor = torch.empty(4), torch.full((4,), float(r + 1))
            leaving = isend(torch.full((4,), 100.0 + r), 1 - r)
            collective(tensor)  # overtakes the mail, which no rank receives yet
            arriving = irecv(mail, 1 - r)
            handle = collective(tensor, async_op=True)
            for transfer in (arriving, leaving, handle):
                transfer.wait()
            assert mail.tolist() == [101.0 - r] * 4
            assert tensor.tolist() == [6.0 if collective is collectives.all_reduce else 1.0] * 4

    run_ranks(both, 2, timeout=20)


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU, so that only a copy of it can be sent."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def to(self, device: str) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_over_gloo_a_gpus_tensors_go_by_way_of_host_memory():
    def exchange(cluster) -> list[float]:
        for name in ("isend", "irecv"):
            plain = getattr(Wire, name)

            def in_host_memory(self, tensor, peer, header=False, plain=plain):
                assert type(tensor) is torch.Tensor
                return plain(self, tensor, peer, header)

            setattr(Wire, name, in_host_memory)
        got = []
        for transport, link in itertools.product(("auto", "gloo"), (None, Link(1e-4, 1e-9))):
            use_transport(transport)
            mine = torch.full((3,), float(cluster.rank)).as_subclass(OnGpu)
            theirs = torch.full((3,), -1.0).as_subclass(OnGpu)
            with slow_link.slowed(link):
                arriving, leaving = irecv(theirs, 1 - cluster.rank), isend(mine, 1 - cluster.rank)
                mine.fill_(9.0)  # it has been copied already
                arriving.wait()
                theirs += 10
                arriving.wait()  # a second time does not copy again
                leaving.wait()
            got += theirs.tolist()
        return got

    assert run_ranks(exchange, 2) == [[11.0] * 12, [10.0] * 12]
