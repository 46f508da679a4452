"""Gradio theme that uses the variables of static/theme.css, so that the lead's and labelers' pages have the same colors.

theme.css redefines the variables in dark mode, so both modes use the same variable names here.
"""

import gradio as gr

_BUTTON = {
    "primary": ("--accent", "--accent", "--accent-ink"),
    "secondary": ("--sheet", "--line", "--ink"),
    "cancel": ("--bad-wash", "--bad", "--bad"),
}
_COLORS = {
    "--paper": ["body_background_fill"],
    "--sheet": [
        "background_fill_primary", "block_background_fill", "block_label_background_fill", "panel_background_fill",
        "input_background_fill", "input_background_fill_focus", "input_background_fill_hover", "table_even_background_fill",
        "checkbox_background_color", "checkbox_background_color_focus", "checkbox_background_color_hover",
        "checkbox_label_background_fill", "checkbox_label_background_fill_hover",
    ],
    "--wash": ["background_fill_secondary", "code_background_fill", "table_odd_background_fill", "table_row_focus"],
    "--ink": [
        "body_text_color", "block_title_text_color", "block_label_text_color", "table_text_color", "accordion_text_color",
        "checkbox_label_text_color", "checkbox_label_text_color_selected",
    ],
    "--soft": ["body_text_color_subdued", "block_info_text_color", "input_placeholder_color"],
    "--line": [
        "block_border_color", "block_label_border_color", "border_color_primary", "checkbox_border_color",
        "checkbox_label_border_color", "input_border_color", "panel_border_color", "table_border_color",
    ],
    "--accent": [
        "border_color_accent", "checkbox_background_color_selected", "checkbox_border_color_focus",
        "checkbox_border_color_hover", "checkbox_border_color_selected", "color_accent", "input_border_color_focus",
        "input_border_color_hover", "link_text_color", "link_text_color_active", "link_text_color_hover",
        "link_text_color_visited", "loader_color", "slider_color",
    ],
    "--accent-wash": ["border_color_accent_subdued", "checkbox_label_background_fill_selected", "color_accent_soft"],
    "--bad-wash": ["error_background_fill"],
    "--bad": ["error_border_color", "error_icon_color", "error_text_color"],
}  # fmt: skip
_SHAPES = {
    "block_radius": "12px", "block_shadow": "none", "block_border_width": "0px", "block_padding": "0px",
    "input_border_width": "1px", "button_border_width": "1px", "checkbox_label_border_width": "1px",
    "input_radius": "8px", "button_large_radius": "8px", "button_medium_radius": "8px", "button_small_radius": "8px",
    "button_large_text_weight": "600", "button_large_text_size": ".92rem", "button_large_padding": ".5rem 1.1rem",
    "button_transform_hover": "none", "input_shadow": "none", "input_shadow_focus": "none", "table_radius": "10px",
    "block_title_text_size": ".85rem", "block_title_text_weight": "600", "layout_gap": "1rem",
    "block_title_background_fill": "transparent", "block_title_padding": "0 0 .2rem",
}  # fmt: skip


def lead_theme() -> gr.themes.Base:
    """Return the theme of the lead's page."""
    values = {name: f"var({color})" for color, names in _COLORS.items() for name in names} | _SHAPES
    for kind, (fill, border, text) in _BUTTON.items():
        for state in ("", "_hover"):
            values[f"button_{kind}_background_fill{state}"] = f"var({fill})"
            values[f"button_{kind}_border_color{state}"] = f"var({border if not state else '--accent'})"
            values[f"button_{kind}_text_color{state}"] = f"var({text})"
    theme = gr.themes.Base(font=["var(--sans)"], font_mono=["var(--mono)"])
    dark = {f"{name}_dark": value for name, value in values.items() if hasattr(theme, f"{name}_dark")}
    return theme.set(**values, **dark)
