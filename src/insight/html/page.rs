//! A report: one HTML file that contains everything it shows.

use super::escape::escape;
use super::heat_map::HeatMap;
use super::plot::Plot;
use super::table::Table;
use std::path::Path;
use std::{fs, io};

/// A page that is built from top to bottom. Every text is escaped, but for that of [`html`](Self::html).
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// A page with this title, which is also its first heading.
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
    pub fn table(self, table: &Table) -> Self {
        self.html(&format!(r#"<div class="scroll">{}</div>"#, table.html()))
    }

    /// Adds a plot.
    pub fn plot(self, plot: &Plot) -> Self {
        self.html(&format!("<figure>{}</figure>", plot.svg()))
    }

    /// Adds a heat map.
    pub fn heat_map(self, map: &HeatMap) -> Self {
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

    /// The whole page.
    pub fn finish(&self) -> String {
        let (title, body, style) = (&self.title, &self.body, include_str!("page.css"));
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
{body}</body>
</html>
"#
        )
    }

    /// Writes the page to a file, whose folder is made if it is missing.
    ///
    /// # Errors
    ///
    /// The error of the operating system, with the path.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let written = folder.map_or(Ok(()), fs::create_dir_all);
        written.and_then(|()| fs::write(path, self.finish())).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_in_every_element() {
        let hostile = "<script>&\"";
        let mut table = Table::new(["run"]);
        table.row([hostile.to_owned()]);
        let page = Page::new(hostile)
            .heading(hostile)
            .subheading(hostile)
            .paragraph(hostile)
            .result(hostile)
            .note(hostile)
            .preformatted(hostile)
            .details(hostile, hostile)
            .table(&table)
            .facts([(hostile, hostile)])
            .finish();
        assert!(!page.contains("<script") && !page.contains("&\""), "{page}");
        // The title, its heading, six elements, two in the details, a class and a cell, and two in the facts.
        assert_eq!(page.matches("&lt;script&gt;&amp;&quot;").count(), 14, "{page}");
    }
}
