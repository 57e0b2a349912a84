"""Algorithms: step functions, the specs of their stages, and the tables that these read. Modules directly in this
package import no torch; stages, estimators and formulas do."""
