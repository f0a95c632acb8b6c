"""Values of any kind, as a file may hold them."""

from __future__ import annotations

from hypothesis import strategies as st

ANY = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.text(max_size=3), max_size=2)
)
