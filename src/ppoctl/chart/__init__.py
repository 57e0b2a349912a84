"""Figures over steps as pictures: what is drawn (`panel`), its scales (`scale`), on a terminal (`terminal`), and as a
drawing of shapes (`drawing`) that becomes SVG (`svg`) or PNG (`png`). Nothing here knows runs."""
