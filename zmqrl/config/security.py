"""The section `security`: who may connect from where."""

from __future__ import annotations

from pydantic import Field

from zmqrl.config.section import Section
from zmqrl.transport.security import Keys


class SecurityConfig(Section):
    """Who may connect. Without keys, sockets are local ones."""

    keys: str | None = Field(
        None, description="folder made by bin/make-keys, or one bundle of it; null: no encryption"
    )
    insecure: bool = Field(
        False, description="without keys: let in whoever reaches a tcp:// address from other machines"
    )

    def keys_of(self, role: str) -> Keys | None:
        """The keys of a role; None if none are configured.

        Raises:
            KeysError: They are not there, are damaged, or others can read them.
        """
        return None if self.keys is None else Keys.load(self.keys, role)
