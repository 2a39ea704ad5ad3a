//! The page.

use std::path::Path;

use super::escape::escape;
use super::heat_map::HeatMap;
use super::plot::Plot;
use super::provenance::provenance;
use super::table::Table;
use crate::atomic;
use crate::error::{Error, Result};

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
        atomic::replace(path.as_ref(), fill).map_err(Error::Save)
    }
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
}
