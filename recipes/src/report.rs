//! What the reports of the recipes have in common.

use super::{Options, log, print};
use anyhow::{Context, Result};
use run_report::{Document, Provenance};
use std::fs;
use tch_amp::insight;

/// Prints where the log is, and writes the report, as far as the options want them. With several runs, each has a log
/// in a folder of its own.
pub fn write(options: &Options, runs: usize, page: impl FnOnce() -> Document) -> Result<()> {
    if let Some(folder) = &options.logs {
        let csv = folder.join(if runs > 1 { "*" } else { "" }).join(log::CSV);
        let (csv, folder) = (csv.display(), folder.display());
        print(format_args!("Log: {csv}, and tensorboard --logdir {folder}"));
    }
    if let Some(path) = &options.out {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        }
        page().write(path)?;
        print(format_args!("Report: {}", path.display()));
    }
    Ok(())
}

/// Begins a report with this title. It ends with the versions, the time and the command that made it.
pub fn document(title: &str) -> Document {
    Document::new(title).provenance(&Provenance::new(&insight::versions()))
}

/// A number in a cell, or `-` where there is none.
pub fn or_dash(cell: Option<impl ToString>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}

/// Bytes in a cell, or `-` where they are not known.
pub fn mebibytes(bytes: Option<u64>) -> String {
    or_dash(bytes.map(|bytes| format!("{} MiB", bytes >> 20)))
}
