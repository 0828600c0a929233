"""Every law by port and clause."""

from __future__ import annotations

from collections.abc import Mapping

from qwen35.domain.capabilities import Clause
from qwen35.testing.capture_laws import capture_laws
from qwen35.testing.conv_kit import ConvKit
from qwen35.testing.gdn_kit import GdnKit
from qwen35.testing.kit import Kit
from qwen35.testing.law import Law
from qwen35.testing.number_laws import number_laws
from qwen35.testing.refusal_laws import refusal_laws
from qwen35.testing.sequence_laws import sequence_laws
from qwen35.testing.size_laws import size_laws
from qwen35.testing.slot_laws import slot_laws

KITS: Mapping[str, Kit] = {kit.port: kit for kit in (GdnKit(), ConvKit())}


def _table(kit: Kit) -> Mapping[Clause, tuple[Law, ...]]:
    every = [
        *slot_laws(kit), *sequence_laws(kit), *size_laws(kit), *number_laws(kit), *capture_laws(kit),
        *refusal_laws(kit),
    ]  # fmt: skip
    return {clause: tuple(law for law in every if law.clause is clause) for clause in Clause}


#: Port to clause to laws; every clause of the contract has at least one.
LAWS: Mapping[str, Mapping[Clause, tuple[Law, ...]]] = {port: _table(kit) for port, kit in KITS.items()}
