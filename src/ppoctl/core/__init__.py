"""Words that every room uses: errors, findings, metrics, units, the base of recipe tables, records, facts about the
machine. Imports no other room."""
