"""The model card of an exported head, written from its report."""

from __future__ import annotations

from typing import Any

_NAMES = {"eagle3": "EAGLE-3", "peagle": "P-EAGLE"}


def model_card(report: dict[str, Any]) -> str:
    """Markdown: what the head is, how it was made, and how far it gets on held-out texts."""
    options, training, target = report["options"], report["training"], report["target"]
    command = f" Command: `{report['command']}`." if report["command"] else ""
    length = f"{training['minutes']:.1f} minutes" if training["minutes"] is not None else f"{training['steps']} steps"
    lines = [
        f"# {_NAMES[options['kind']]} draft head for {target['name']}",
        "",
        f"{report['parameters']:,} parameters, layers: {options['num_layers']}, {report['draft_vocab']:,} draft tokens that cover "
        f"{100 * report['coverage']:.2f} % of the target's own; token embedding shared with the target; stored as {options['storage']}.",
        "",
        f"Trained with specdec {report['specdec']} (torch {report['torch']}) for {length}: {report['steps']:,} steps, "
        f"{report['epochs']} full epochs over {report['sequences']:,} answers ({report['answer_tokens']:,} tokens) that the target wrote "
        f"at temperatures {', '.join(map(str, report['temperatures']))}. Sequences up to {options['max_len']} tokens, "
        f"{training['depths']} drafts deep, seed {training['seed']}.",
        "",
        f"Target fingerprint: `{target['fingerprint']}`.{command}",
        "",
    ]
    return "\n".join([*lines, *_table(report["acceptance"])]) + "\n"


def _table(acceptance: dict[str, Any]) -> list[str]:
    """Acceptance length of greedy chains by domain."""
    if not acceptance:
        return ["No texts were held out."]
    depths = len(acceptance["all"]["lengths"])
    head = [
        "Acceptance length (committed tokens per target pass) of greedy chains of K drafts, walked over held-out answers of temperature 0:",
        "",
    ]
    rows = [f"| domain | tokens | {' | '.join(f'K = {k + 1}' for k in range(depths))} |", "|---" * (depths + 2) + "|"]
    for domain, entry in acceptance.items():
        rows.append(f"| {domain} | {entry['tokens'][0]:,} | {' | '.join(f'{value:.2f}' for value in entry['lengths'])} |")
    return [*head, *rows]
