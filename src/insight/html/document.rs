//! The page.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use std::{env, fmt};

use lazy_static::lazy_static;

use super::axis::escape;
use super::heat_map::HeatMap;
use super::plot::Plot;
use crate::error::{Error, Result};
use crate::ffi;
use torch_files::atomic;

/// An HTML page that is built from top to bottom. It refers to no other file, and every text is escaped, except that of
/// [`html`](Self::html). See the [module](super) for an example.
#[derive(Clone, Debug)]
#[must_use = "a document is shown once it is written"]
pub struct Document {
    title: String,
    body: String,
}

impl Document {
    /// Creates a page with this title, which is also its first heading.
    pub fn new(title: &str) -> Self {
        let title = escape(title);
        let body = format!("<h1>{title}</h1>\n");
        Self { title, body }
    }

    /// Adds a heading of a section.
    pub fn heading(self, text: &str) -> Self {
        self.element("h2", text)
    }

    /// Adds a heading within a section.
    pub fn subheading(self, text: &str) -> Self {
        self.element("h3", text)
    }

    /// Adds a paragraph.
    pub fn paragraph(self, text: &str) -> Self {
        self.element("p", text)
    }

    /// Adds a paragraph in bold: the result of the page.
    pub fn result(self, text: &str) -> Self {
        let text = escape(text);
        self.html(&format!("<p><strong>{text}</strong></p>"))
    }

    /// Adds a note, in small type.
    pub fn note(self, text: &str) -> Self {
        let text = escape(text);
        self.html(&format!(r#"<p class="note">{text}</p>"#))
    }

    /// Adds a table.
    pub fn table<const N: usize>(self, table: &Table<N>) -> Self {
        self.html(&format!(r#"<div class="scroll">{}</div>"#, table.html()))
    }

    /// Adds a plot.
    pub fn plot(self, plot: &Plot) -> Self {
        self.html(&format!("<figure>{}</figure>", plot.svg()))
    }

    /// Adds a heat map.
    pub(in crate::insight) fn heat_map(self, map: &HeatMap) -> Self {
        self.html(&format!("<figure>{}</figure>", map.svg()))
    }

    /// Adds a text that opens below a line.
    pub fn details(self, summary: &str, text: &str) -> Self {
        let (summary, text) = (escape(summary), escape(text));
        self.html(&format!("<details><summary>{summary}</summary><pre>{text}</pre></details>"))
    }

    /// Adds a plot of the same losses in several precisions, whose lines nearly coincide.
    pub fn plot_of_precisions(self, plot: &Plot) -> Self {
        self.html(&format!(r#"<figure class="loss">{}</figure>"#, plot.svg()))
    }

    /// Adds text that keeps its lines and spaces, such as code.
    pub fn preformatted(self, text: &str) -> Self {
        self.element("pre", text)
    }

    /// Adds pairs of a name and what belongs to it.
    pub fn facts<N: AsRef<str>, T: AsRef<str>>(
        self,
        facts: impl IntoIterator<Item = (N, T)>,
    ) -> Self {
        let pair = |(name, text): (N, T)| {
            format!("<dt>{}</dt><dd>{}</dd>\n", escape(name.as_ref()), escape(text.as_ref()))
        };
        let pairs: String = facts.into_iter().map(pair).collect();
        self.html(&format!("<dl>\n{pairs}</dl>"))
    }

    /// Adds HTML as it is.
    pub fn html(mut self, html: &str) -> Self {
        self.body.push_str(html);
        self.body.push('\n');
        self
    }

    fn element(self, tag: &str, text: &str) -> Self {
        let text = escape(text);
        self.html(&format!("<{tag}>{text}</{tag}>"))
    }

    /// Returns the page as HTML. It ends with the versions of this crate and of libtorch, the time, and the command
    /// line of the program: look for secrets among its arguments before you share a page.
    pub fn to_html(&self) -> String {
        let (title, body, style) = (&self.title, &self.body, include_str!("document.css"));
        let footer = escape(&provenance());
        format!(
            r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}<footer>{footer}</footer>
</body>
</html>
"#
        )
    }

    /// Writes [`to_html`](Self::to_html) to a file. An older file is replaced as a whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Save`] if the file cannot be written, for instance because its folder does not exist.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let html = self.to_html();
        let fill = &mut |out: &mut dyn atomic::Target| out.write_all(html.as_bytes());
        atomic::replace(path.as_ref(), fill).map(drop).map_err(Error::Save)
    }
}

lazy_static! {
    /// When the first page of this process was made, in words.
    static ref MADE: String = {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        utc(since.map_or(0, |since| since.as_secs()))
    };
}

/// The versions, the time and the command. All pages of a process have the same time.
pub(super) fn provenance() -> String {
    let (own, libtorch) = (env!("CARGO_PKG_VERSION"), ffi::libtorch_version());
    format!("Made with tch-amp {own} and libtorch {libtorch}, {}, by: {}", *MADE, command())
}

/// The command line, with the name of the program instead of its path.
fn command() -> String {
    let mut words: Vec<_> =
        env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(program) = words.first_mut() {
        let name = Path::new(program).file_name().map(|name| name.to_string_lossy().into_owned());
        *program = name.unwrap_or_default();
    }
    words.join(" ")
}

/// A time in seconds since 1970, such as `2026-11-26 02:35 UTC`.
fn utc(seconds: u64) -> String {
    let (mut days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    let mut year = 1970;
    while days >= days_of(year) {
        days -= days_of(year);
        year += 1;
    }
    let february = days_of(year) - 337;
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (day, hour, minute) = (days + 1, minutes / 60, minutes % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02} UTC")
}

/// The number of days of a year.
fn days_of(year: u64) -> u64 {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    if is_leap { 366 } else { 365 }
}

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
    fn texts_are_escaped_in_every_element() {
        let hostile = "<script>&\"";
        let mut table = Table::new(["run"]);
        table.rows.push([hostile.to_owned()]);
        let page = Document::new(hostile)
            .heading(hostile)
            .subheading(hostile)
            .paragraph(hostile)
            .result(hostile)
            .note(hostile)
            .preformatted(hostile)
            .details(hostile, hostile)
            .table(&table)
            .facts([(hostile, hostile)])
            .to_html();
        assert!(!page.contains("<script") && !page.contains("&\""), "{page}");
        // The title, its heading, six elements, two in the details, a class and a cell, and two in the facts.
        assert_eq!(page.matches("&lt;script&gt;&amp;&quot;").count(), 14, "{page}");
    }

    /// The times are those of `date --utc --date=@SECONDS`.
    #[test]
    fn times_are_those_of_the_calendar() {
        let times = [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59 UTC"),
            (1_795_660_500, "2026-11-26 02:35 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ];
        for (seconds, time) in times {
            assert_eq!(utc(seconds), time);
        }
    }

    #[test]
    fn the_command_has_no_path() {
        let text = provenance();
        let program = text.split("by: ").nth(1).and_then(|words| words.split(' ').next());
        assert!(program.is_some_and(|name| !name.is_empty() && !name.contains('/')), "{text}");
    }

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
