"""A server on the loopback that stands in for an engine's."""

from support.loopback import stand_in as stand_in
