"""From meeting the others to leaving them: sessions and their engine, joins, who is late or lost, ends and forks."""
