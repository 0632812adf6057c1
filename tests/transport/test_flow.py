from __future__ import annotations

import pytest

from surgeon.transport.flow import IDENTITY, SOLVED, Flow, MapRef, transport_flow

T_Q, T_O = MapRef("query"), MapRef("output")
HALF_O = MapRef("output", half_identity=True)


def test_table_1() -> None:
    flow = transport_flow("opt_deus")
    assert flow["pre_attention_norm"] == Flow(IDENTITY, IDENTITY)
    assert flow["pre_mlp_norm"].t_out == HALF_O
    inputs = {role: flow[role].t_in for role in SOLVED}
    assert inputs == dict.fromkeys(SOLVED, IDENTITY) | {"gate": T_O, "up": T_O}
    assert all(flow[role].t_out == MapRef(role) for role in SOLVED)


@pytest.mark.parametrize(
    ("variant", "changed"),
    [
        ("vanilla_output", {"output": T_Q}),
        ("vanilla_mlp", {"gate": HALF_O, "up": HALF_O}),
        ("vanilla", {"output": T_Q, "gate": HALF_O, "up": HALF_O}),
    ],
)
def test_table_7(variant: str, changed: dict[str, MapRef]) -> None:
    plain, flow = transport_flow("opt_deus"), transport_flow(variant)
    assert {role: flow[role].t_in for role in flow if flow[role] != plain[role]} == changed
    assert all(flow[role].t_out == plain[role].t_out for role in flow)


def test_every_map_is_solved_before_it_is_needed() -> None:
    for variant in ("opt_deus", "vanilla_output", "vanilla_mlp", "vanilla"):
        solved: list[str | None] = [None]
        for role, flow in transport_flow(variant).items():
            assert flow.t_in.role in solved
            if role in SOLVED:
                solved.append(role)


def test_unknown_variant() -> None:
    with pytest.raises(ValueError, match=r"flow must be one of opt_deus, .*not 'plain'"):
        transport_flow("plain")
