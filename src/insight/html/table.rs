//! Tables, as text and as HTML.

use std::fmt;

use super::escape::escape;

/// A table with `N` columns, as text by `Display` and as HTML. The first column names the rows and is aligned to the
/// left.
#[derive(Clone, Debug)]
pub struct Table<const N: usize> {
    /// The names of the columns.
    pub header: [String; N],
    /// The cells, row by row.
    pub rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    /// Creates a table without rows.
    pub fn new(header: [&str; N]) -> Self {
        Self { header: header.map(str::to_owned), rows: Vec::new() }
    }

    /// The `<table>` element. The class of a row is its first cell, which gives it the colour of a line in a plot.
    pub(super) fn html(&self) -> String {
        let cells = |tag: &str, cells: &[String]| -> String {
            cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect()
        };
        let row = |row: &[String; N]| {
            let name = row.first().map_or_else(String::new, |name| escape(name));
            format!(r#"<tr class="{name}">{}</tr>"#, cells("td", row))
        };
        let rows: String = self.rows.iter().map(row).collect();
        let header = cells("th", &self.header);
        format!("<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>")
    }
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut widths: Vec<usize> = self.header.iter().map(|cell| cell.chars().count()).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let rule: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
        line(f, &self.header, &widths)?;
        line(f, &rule, &widths)?;
        self.rows.iter().try_for_each(|row| line(f, row, &widths))
    }
}

fn line(f: &mut fmt::Formatter<'_>, cells: &[String], widths: &[usize]) -> fmt::Result {
    for (index, (cell, width)) in cells.iter().zip(widths).enumerate() {
        match index {
            0 => write!(f, "{cell:<width$}")?,
            _ => write!(f, "  {cell:>width$}")?,
        }
    }
    writeln!(f)
}

/// A number in a cell, or `-` where there is none.
pub(in crate::insight) fn or_dash(cell: Option<impl ToString>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_markup_is_escaped() {
        let mut table = Table::new(["run", "loss"]);
        table.rows.push(["a<b".to_owned(), "0.5".to_owned()]);
        table.rows.push(["långsam".to_owned(), or_dash(None::<f64>)]);
        let text = table.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines, ["run      loss", "-------  ----", "a<b       0.5", "långsam     -"]);
        assert!(table.html().contains("<td>a&lt;b</td>"), "{}", table.html());
    }
}
