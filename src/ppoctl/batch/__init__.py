"""What flows between the stages: frozen, self-checking records on the response grid."""
