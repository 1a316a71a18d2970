"""Results of any evaluation as text."""

from pospre.evaluation.results_table import results_table

ROWS = [
    {"layer": 1, "near": 0.25, "near_se": 0.01, "heads": [{"head": 0}], "peak": [0, 1]},
    {"layer": 2, "near": 0.5, "near_se": None, "heads": [{"head": 0}], "peak": [1, 0]},
]
NEAR = """\
layers

layer         near  peak
─────  ───────────  ────
1      0.25 ± 0.01  0, 1
2              0.5  1, 0
─────  ───────────  ────
"""


def test_a_list_is_a_table_and_leaves_out_what_fits_no_cell() -> None:
    results = {"layers": ROWS, "near": 0.375, "near_se": 0.012, "grid": [14, 14], "samples": 6}
    text = results_table("relative_attention", results)
    assert text.startswith(NEAR) and "0.375 ± 0.012" in text and "untrained" not in text
    assert text.endswith("grid: 14, 14\nsamples 6")
    one = results_table("relative_attention", {**results, "layers": [{"layer": 1, "heads": [{}]}]})
    assert one.startswith("relative_attention: ")  # a table of one column says nothing


def test_figures_stand_with_their_errors_and_the_untrained_models() -> None:
    results = {
        "chance": 0.5,
        "top1": 0.75,
        "standard_error": 0.125,
        "initial_top1": 0.51234,
        "top1_difference": 0.2377,
        "top1_difference_se": 0.05,
        "layers": None,
        "temperature": 0.07,
        "classes": 2,
    }
    lines = results_table("knn", results).splitlines()
    assert lines[0].startswith("knn: ") and lines[2].split()[2:] == ["untrained", "difference"]
    assert lines[4].split() == ["top1", "0.75", "±", "0.12", "0.5123", "0.2377", "±", "0.05"]
    assert lines[5].split() == ["chance", "0.5", "–", "–"]
    assert lines[-1] == "temperature 0.07, classes 2"


def test_without_figures_there_is_no_table_of_figures() -> None:
    pictures = [{"index": 3, "original": "a.png", "accuracy": 0.5}]
    text = results_table("position_pictures", {"pictures": pictures, "mask_ratio": 0.25})
    table, rest = text.split("\n\n")[1:]
    assert table.splitlines()[0].split() == ["index", "original", "accuracy"]
    assert rest.splitlines()[1:] == ["mask_ratio 0.25"] and "figure" not in text


def test_what_is_by_name_is_a_line_of_notes() -> None:
    results = {"mIoU": 0.5, "mIoU_se": 0.1, "IoU": {"sky": 1.0, "road": None}, "initial_IoU": None}
    text = results_table("segmentation", results)
    assert text.endswith("IoU: sky 1, road –") and "0.5 ± 0.1" in text
    text = results_table("position_removal", {"evaluations": {"knn": {"top1": [0.5, 0.25]}}})
    assert text.endswith("evaluations: knn top1 0.5, 0.25")


def test_several_rows_of_a_layer_make_layers_the_columns() -> None:
    rows = [
        {"model": model, "layer": layer, "top1": layer / 4, "top1_se": 0.1, **more}
        for model, more in (("trained", {}), ("untrained", {"r2": -0.5}))
        for layer in (0, 1)
    ]
    table = [line.split() for line in results_table("position_probe", {"rows": rows}).splitlines()]
    assert table[2] == ["model", "figure", "layer", "0", "1"]
    assert table[4] == ["trained", "top1", "0.000", "0.250"]
    assert table[5:7] == [
        ["untrained", "top1", "0.000", "0.250"],
        ["untrained", "r2", *["-0.500"] * 2],
    ]
