"""Logits of codons by organism and by the residues around them: a table of counts, which the layers add to."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ascendrun.programs.codon.genes import Genes
from ascendrun.programs.codon.vocabulary import FIRST_CODON, MASK_OF, PAD
from ascendrun.programs.trainer.data import pad

SMOOTHINGS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, 100_000.0)
"""Codons with the frequencies of the organism that are added to the counts of each residue and neighbour: few genes
need more, so that chance is not learned."""
OTHER = 0.001
"""Frequency of each token that is not a codon of the residue: `mask_schedule: constant` shows some at random."""
COUNTED = 256
"""Genes at a time."""


class Context(nn.Module):
    """A row of the table has the logits of all codons, given one residue. Rows are by organism, by distance of the
    residue from -`reach` to `reach`, and by residue; the start, the end and padding count as residues.

    It is not trained: it has counts of all training genes, and may have more weights than the layers, whose gradients
    would be exchanged at each step.
    """

    def __init__(self, organisms: int, reach: int) -> None:
        super().__init__()
        self.reach, self.distances = reach, 2 * reach + 1
        self.table = nn.Embedding(organisms * self.distances * FIRST_CODON, len(MASK_OF) - FIRST_CODON)
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor, organisms: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """Return what is added to logits, which is 0 for tokens that are not codons. Arguments: as of the model."""
        rows = self.rows_of(ids, organisms)
        rows = rows if places is None else rows.flatten(0, 1)[places]
        return nn.functional.pad(self.table(rows).sum(-2), (FIRST_CODON, 0))

    def rows_of(self, ids: torch.Tensor, organisms: torch.Tensor) -> torch.Tensor:
        """Return the rows of the table of each token: rows x length x distances."""
        residues = torch.tensor(MASK_OF, device=ids.device)[ids]
        near = nn.functional.pad(residues, (self.reach, self.reach), value=PAD).unfold(1, self.distances, 1)
        places = organisms[:, None] * self.distances + torch.arange(self.distances, device=ids.device)
        return places[:, None] * FIRST_CODON + near


def fill(context: Context, genes: Genes) -> None:
    """Fill the rows of organisms that have none yet from the training genes.

    Those of a codon's own residue become its log frequency, next to 0 for all other tokens; the others become how much
    likelier it is next to such a residue, drawn to 0 as far as makes each codon likeliest by the counts of the others.
    """
    table = context.table.weight.data.view(-1, context.distances, FIRST_CODON, context.table.embedding_dim)
    numbers = genes.numbers(val=False)
    is_known = table.flatten(1).any(1).numpy()
    numbers = numbers[~is_known[genes.organisms[numbers]]]
    if not len(numbers):
        return
    counts = torch.zeros(table.numel(), dtype=torch.int64)
    for part in np.array_split(numbers, -(-len(numbers) // COUNTED)):
        ids = pad([genes[number] for number in part], value=PAD)
        rows = context.rows_of(ids, torch.from_numpy(np.asarray(genes.organisms)[part].astype(np.int64)))
        is_codon = ids >= FIRST_CODON
        cells = rows[is_codon] * table.shape[-1] + (ids[is_codon] - FIRST_CODON)[:, None]
        counts += torch.bincount(cells.flatten(), minlength=len(counts))
    seen = np.unique(np.asarray(genes.organisms)[numbers])
    counted = counts.view(table.shape)[seen].double()
    residues = torch.tensor(MASK_OF[FIRST_CODON:])
    synonyms = (residues[:, None] == residues).double()
    own = counted[:, context.reach].sum(1, keepdim=True) + 1  # none has frequency 0
    frequencies = (own / (own @ synonyms))[:, None]
    totals = counted @ synonyms
    fits = [  # how likely each codon is by the others
        torch.xlogy(counted, (counted - 1 + each * frequencies) / (totals - 1 + each)).sum((2, 3))
        for each in SMOOTHINGS
    ]
    smoothing = torch.tensor(SMOOTHINGS)[torch.stack(fits).argmax(0)][..., None, None]
    found = (counted / frequencies + smoothing) / (totals + smoothing)
    is_own = torch.arange(FIRST_CODON)[:, None] == residues
    found[:, context.reach] = torch.where(is_own, frequencies[:, 0] / OTHER, 1.0)
    table[seen] = found.log().float()
