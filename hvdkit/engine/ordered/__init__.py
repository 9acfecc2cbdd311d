"""Operations that the ranks of a group match by their order: no names, no coordinator."""
