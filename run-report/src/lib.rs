//! Writes the report of a training run as one HTML file of tables, line plots and heat maps. The file needs no network
//! and runs no script.
//!
//! A [`Document`] is built from top to bottom. Its plots are SVG, drawn from [`Series`] of points, and its [`Table`]s
//! also print as text. Every text is escaped. Colours follow the reader's choice of light or dark, and a pointer over a
//! cross or a cell shows its text.
//!
//! The style sheet has a colour for each of the classes `first`, `second` and `third`, and of `fp32`, `bf16` and
//! `fp16`: the class of a series, and the first cell of a row in a table.
//!
//! # Examples
//!
//! ```
//! use run_report::{Document, Plot, Provenance, Series, Spacing, Table};
//!
//! let losses: Vec<_> = (1..=100).map(|step| (f64::from(step), 1.0 / f64::from(step))).collect();
//! let mut table = Table::new(["run", "final loss"]);
//! table.rows.push(["bf16".to_owned(), format!("{:.3}", losses[99].1)]);
//! println!("{table}");
//!
//! let loss = Series::smoothed("bf16", "training", losses, 0.9);
//! let plot = Plot::new("Loss in training", ["step", "loss"], Spacing::Log10, vec![loss]);
//! let document = Document::new("A run in bf16").table(&table).heading("Loss").plot(&plot);
//! let html = document.provenance(&Provenance::new("my-trainer 1.0")).to_html();
//! assert!(html.contains("<h2>Loss</h2>") && html.contains("<svg"));
//! ```

#![forbid(unsafe_code)]

/// The README, whose program is compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

// The plots are drawn here because no library draws them in one file without scripts:
//
// - plotters 0.3.7 with its SVG backend adds 2.6 s to a debug build on one core, 5.4 s where num-traits is not built
//   already. It has logarithmic axes. It writes every colour into its element and no class, so that no style sheet makes
//   them light or dark, and no `<title>`, so that nothing shows the text of a cross or a cell.
// - poloto 19.1.2 draws lines with classes, but has no logarithmic axis, no heat map and no `<title>`.
// - charming 0.6.0 makes pages that load the scripts of ECharts from the network. Without scripts it runs these when
//   the page is made, by means of deno_core, which builds V8.

mod axis;
mod document;
mod heat_map;
mod plot;
mod provenance;
mod table;

pub use axis::Spacing;
pub use document::Document;
pub use heat_map::HeatMap;
pub use plot::{Plot, Series};
pub use provenance::Provenance;
pub use table::{Column, Table};

/// Escapes a text for HTML, also for an attribute in quotes.
///
/// # Examples
///
/// ```
/// assert_eq!(run_report::escape("a < b"), "a &lt; b");
/// ```
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
