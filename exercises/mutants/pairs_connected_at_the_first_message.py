"""With nccl a pipeline may hang in its first step: ranks connect only when both reach their first message."""

TARGET = "comm.transport.channels.Channels._connect"
KILLER = (
    "tests.comm.test_channels."
    "test_all_pairs_are_connected_before_the_first_message_where_connecting_holds_up_the_host"
)


def mutant(self, pairs) -> None:
    pass
