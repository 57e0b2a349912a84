"""Errors, findings, metrics, units, the base of recipe tables, records, facts about the machine: parts that every
package uses. Imports no other package."""
