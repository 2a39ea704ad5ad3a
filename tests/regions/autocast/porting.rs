//! The guide's page on porting, `docs/porting.md`, has a row for every public name of PyTorch's AMP.

use std::fs;

use testkit::python::{Oracle, root};

const PAGE: &str = "docs/porting.md";

/// The headings of the table of calls and of what follows it.
const TABLE: (&str, &str) = ("\n## Call by call\n", "\n## ");

#[test]
fn every_public_name_of_pytorchs_amp_is_in_the_table_of_calls() {
    let Some(oracle) = Oracle::find("amp_names.py") else { return };
    let page = fs::read_to_string(root().join(PAGE)).unwrap();
    let (_, table) = page.split_once(TABLE.0).expect("the page has the table");
    let (table, _) = table.split_once(TABLE.1).expect("a section follows it");
    let python: Vec<_> = table.lines().filter_map(|row| row.split('|').nth(1)).collect();
    let names = oracle.run(&[], "");
    let missing: Vec<_> =
        names.lines().filter(|name| !python.iter().any(|cell| mentions(cell, name))).collect();
    assert!(names.lines().count() > 40, "{names}");
    assert!(missing.is_empty(), "{PAGE} has no row for {missing:?}");
}

/// Whether a cell has the name, and not only as the beginning of a longer one.
fn mentions(cell: &str, name: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    cell.match_indices(name).any(|(at, _)| !cell[at + name.len()..].starts_with(is_part))
}

/// The rows of docs/differences.md on calls, from PyTorch's side.
#[test]
fn pytorch_differs_as_documented() {
    if let Some(oracle) = Oracle::find("amp_deviations.py") {
        assert_eq!(oracle.run(&[], "").trim(), "as the table says");
    }
}
