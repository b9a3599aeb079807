"""Errors meant for the user: the message alone says what to change, no traceback needed."""


class PerfModelError(ValueError):
    """Base of all errors with a message for the user.

    The first line of the message is complete in itself; detail lines may follow it.
    """


class CardError(PerfModelError):
    """A hardware or model card is wrong; names the file, the field, its value and what is right.

    `faults` holds every fault of the card, where there is more than the one in the message.
    """

    faults: tuple[str, ...] = ()


class InputError(PerfModelError):
    """An argument is wrong: an unknown id, a number out of range, a plan the model can't take."""


class DoesNotFit(PerfModelError):
    """Weights, cache and buffers need more memory than each GPU has."""


class CardsWarning(UserWarning):
    """Two cards have one name; says which of them is used."""
