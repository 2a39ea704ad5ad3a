//! Tables, as text and as HTML.

use std::fmt;

use crate::escape;

/// A column of a [`Table`]: its name, and its layout in the text. Made from a name alone, it is as wide as its widest
/// cell and two spaces away from the one before it.
#[derive(Clone, Debug)]
pub struct Column {
    name: String,
    name_in_text: Option<String>,
    is_in_text: bool,
    is_left: bool,
    gap: usize,
    width: Option<usize>,
}

impl Column {
    /// Creates a column with this name, aligned to the right.
    pub fn new(name: &str) -> Self {
        let (name, name_in_text) = (name.to_owned(), None);
        Self { name, name_in_text, is_in_text: true, is_left: false, gap: 2, width: None }
    }

    /// Aligns the column to the left in the text. The first column of a table always is.
    pub fn left(self) -> Self {
        Self { is_left: true, ..self }
    }

    /// Sets how many spaces are before the column in the text, 2 by default. Before the first column there are none.
    pub fn gap(self, gap: usize) -> Self {
        Self { gap, ..self }
    }

    /// Sets the width in the text. Longer cells are neither cut nor do they widen the others.
    pub fn width(self, width: usize) -> Self {
        Self { width: Some(width), ..self }
    }

    /// Gives the column another name in the text, such as a shorter one.
    pub fn name_in_text(self, name: &str) -> Self {
        Self { name_in_text: Some(name.to_owned()), ..self }
    }

    /// Leaves the column out of the text.
    pub fn only_in_html(self) -> Self {
        Self { is_in_text: false, ..self }
    }

    fn shown_in_text(&self) -> &str {
        self.name_in_text.as_ref().unwrap_or(&self.name)
    }
}

impl From<&str> for Column {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

/// A table with `N` columns, as text by `Display` and as HTML in a [`Document`](crate::Document). The first column names
/// the rows and is aligned to the left.
///
/// # Examples
///
/// ```
/// use run_report::{Column, Table};
///
/// let columns = [Column::new("part"), Column::new("error").width(8), Column::new("seconds").only_in_html()];
/// let mut table = Table::new(columns);
/// table.rows.push(["head".to_owned(), "0.5".to_owned(), "2".to_owned()]);
/// assert_eq!(table.plain(), "part     error\nhead       0.5\n");
/// ```
#[derive(Clone, Debug)]
pub struct Table<const N: usize> {
    /// The columns.
    pub columns: [Column; N],
    /// The cells, row by row.
    pub rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    /// Creates a table without rows.
    pub fn new<C: Into<Column>>(columns: [C; N]) -> Self {
        Self { columns: columns.map(Into::into), rows: Vec::new() }
    }

    /// Returns the text without the rule below the names.
    pub fn plain(&self) -> String {
        let widths = self.widths();
        let rows = self.rows.iter().map(|row| self.line(row, &widths));
        self.names(&widths) + &rows.collect::<String>()
    }

    /// The `<table>` element. The class of a row is its first cell, which gives it the colour of a line in a plot.
    pub(crate) fn html(&self) -> String {
        let cell = |tag: &str, cell: &str| format!("<{tag}>{}</{tag}>", escape(cell));
        let row = |row: &[String; N]| {
            let name = row.first().map_or_else(String::new, |name| escape(name));
            let cells: String = row.iter().map(|text| cell("td", text)).collect();
            format!(r#"<tr class="{name}">{cells}</tr>"#)
        };
        let rows: String = self.rows.iter().map(row).collect();
        let header: String = self.columns.iter().map(|column| cell("th", &column.name)).collect();
        format!("<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>")
    }

    /// The width of each column in the text.
    fn widths(&self) -> [usize; N] {
        let widest = |index: usize| {
            let cells = self.rows.iter().map(|row| row[index].chars().count());
            cells.max().unwrap_or(0).max(self.columns[index].shown_in_text().chars().count())
        };
        std::array::from_fn(|index| self.columns[index].width.unwrap_or_else(|| widest(index)))
    }

    /// The first line of the text.
    fn names(&self, widths: &[usize; N]) -> String {
        self.line(&self.columns.each_ref().map(Column::shown_in_text), widths)
    }

    fn line(&self, cells: &[impl AsRef<str>], widths: &[usize; N]) -> String {
        let mut line = String::new();
        let cells = self.columns.iter().zip(cells).zip(widths).enumerate();
        for (index, ((column, cell), &width)) in
            cells.filter(|(_, ((column, _), _))| column.is_in_text)
        {
            let (cell, gap) = (cell.as_ref(), if index == 0 { 0 } else { column.gap });
            line += &" ".repeat(gap);
            line += &match index == 0 || column.is_left {
                true => format!("{cell:<width$}"),
                false => format!("{cell:>width$}"),
            };
        }
        line + "\n"
    }
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.widths();
        f.write_str(&self.names(&widths))?;
        f.write_str(&self.line(&widths.map(|width| "-".repeat(width)), &widths))?;
        self.rows.iter().try_for_each(|row| f.write_str(&self.line(row, &widths)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_markup_is_escaped() {
        let mut table = Table::new(["run", "loss"]);
        table.rows.push(["a<b".to_owned(), "0.5".to_owned()]);
        table.rows.push(["långsam".to_owned(), "-".to_owned()]);
        let text = table.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines, ["run      loss", "-------  ----", "a<b       0.5", "långsam     -"]);
        assert!(table.html().contains("<td>a&lt;b</td>"), "{}", table.html());
    }

    #[test]
    fn the_layout_of_a_column_is_that_of_the_text_alone() {
        let mut table = Table::new([
            Column::new("part").width(6),
            Column::new("gradient error").name_in_text("gradient").width(9).gap(1),
            Column::new("seconds").only_in_html(),
            Column::new("dtypes").left().width(0),
        ]);
        table.rows.push(["a", "0.25", "2", "3 bf16"].map(str::to_owned));
        table.rows.push(["a long name", "", "", "1 f32"].map(str::to_owned));
        let text = table.plain();
        let lines: Vec<&str> = text.lines().collect();
        let wanted = [
            "part    gradient  dtypes",
            "a           0.25  3 bf16",
            "a long name            1 f32",
        ];
        assert_eq!(lines, wanted);
        let html = table.html();
        for text in ["<th>gradient error</th>", "<th>seconds</th>", "<td>2</td>"] {
            assert!(html.contains(text), "{html}");
        }
    }
}
