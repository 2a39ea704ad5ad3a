//! Pages, plots and tables for reports: each report is one HTML file that contains everything it shows.
//!
//! A [`Document`] is built from top to bottom. Its plots are SVG, drawn from [`Series`] of points, and its [`Table`]s
//! also print as text. Every text is escaped.
//!
//! The style sheet has a colour for each of the classes `first`, `second` and `third`, and of `fp32`, `bf16` and
//! `fp16`: the class of a series, and the first cell of a row in a table.
//!
//! # Examples
//!
//! ```
//! use tch_amp::insight::html::{Document, Plot, Series, Spacing, Table};
//!
//! let losses: Vec<_> = (1..=100).map(|step| (f64::from(step), 1.0 / f64::from(step))).collect();
//! let mut table = Table::new(["run", "final loss"]);
//! table.rows.push(["bf16".to_owned(), format!("{:.3}", losses[99].1)]);
//! println!("{table}");
//!
//! let loss = Series::smoothed("bf16", "training", losses, 0.9);
//! let plot = Plot::new("Loss in training", ["step", "loss"], Spacing::Log10, vec![loss]);
//! let html = Document::new("A run in bf16").table(&table).heading("Loss").plot(&plot).to_html();
//! assert!(html.contains("<h2>Loss</h2>") && html.contains("<svg"));
//! ```

mod axis;
mod document;
mod heat_map;
mod plot;

pub use axis::Spacing;
pub use document::Document;
pub use document::Table;
pub(super) use document::or_dash;
pub(super) use heat_map::{Bound, Cell, HeatMap};
pub use plot::{Plot, Series};
