//! The page.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;

use crate::escape;
use crate::heat_map::HeatMap;
use crate::plot::Plot;
use crate::provenance::Provenance;
use crate::table::Table;

/// An HTML page that is built from top to bottom. It refers to no other file, and every text is escaped, except that of
/// [`html`](Self::html). See the [crate](crate) for an example.
#[derive(Clone, Debug)]
#[must_use = "a document is shown once it is written"]
pub struct Document {
    title: String,
    body: String,
    /// The last element, or nothing.
    footer: String,
}

impl Document {
    /// Creates a page with this title, which is also its first heading.
    pub fn new(title: &str) -> Self {
        let title = escape(title);
        let body = format!("<h1>{title}</h1>\n");
        Self { title, body, footer: String::new() }
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

    /// Ends the page with how it was made, whatever is added later.
    pub fn provenance(self, provenance: &Provenance) -> Self {
        let footer = format!("<footer>{}</footer>", escape(&provenance.to_string()));
        Self { footer, ..self }
    }

    /// Returns the page as HTML.
    pub fn to_html(&self) -> String {
        let Self { title, body, footer } = self;
        let style = include_str!("document.css");
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
{body}{footer}
</body>
</html>
"#
        )
    }

    /// Writes [`to_html`](Self::to_html) to a file, through a new file beside it: an older one is replaced as a whole
    /// or not at all, and keeps its permissions. If `path` is a symbolic link, the file that it leads to is replaced.
    ///
    /// # Errors
    ///
    /// The error of the file system with the path, for instance if the folder does not exist.
    pub fn write(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        replace(path, self.to_html().as_bytes()).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot write `{}`: {error}", path.display()))
        })
    }
}

/// How many names that already exist are skipped: leftovers of killed processes, and files that other threads write.
const MOST_TRIES: u32 = 1000;

/// Writes a file and renames it to `path`.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    // A path that leads nowhere yet is its own target.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let old = fs::metadata(&path).ok();
    if old.as_ref().is_some_and(|old| !old.is_file()) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let (temporary, mut file) = create_beside(&path)?;
    let fill = || {
        if let Some(old) = old {
            file.set_permissions(old.permissions())?;
        }
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&temporary, &path)
    };
    fill().inspect_err(|_| {
        // The first error says more than that of removing what it left.
        let _removed = fs::remove_file(&temporary);
    })
}

/// Creates a file beside `path` that nothing else writes.
fn create_beside(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut tries = 0;
    loop {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}-{tries}.tmp", process::id()));
        let temporary = path.with_file_name(name);
        tries += 1;
        match File::create_new(&temporary) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && tries < MOST_TRIES => {}
            created => return Ok((temporary, created?)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

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

    #[test]
    fn a_page_ends_with_its_provenance() {
        let page = Document::new("it").provenance(&Provenance::new("<1.0>")).paragraph("later");
        let html = page.to_html();
        assert!(html.contains("<p>later</p>\n<footer>Made with &lt;1.0&gt;, "), "{html}");
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("run-report-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("page.html");
        for title in ["one", "two"] {
            let page = Document::new(title);
            page.write(&file).unwrap();
            assert_eq!(fs::read_to_string(&file).unwrap(), page.to_html());
        }
        let error = Document::new("three").write(&folder).unwrap_err().to_string();
        assert!(error.contains("not a regular file") && error.contains("run-report"), "{error}");
        let error = Document::new("three").write(folder.join("no/page.html")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "a temporary file is left");
        fs::remove_dir_all(&folder).unwrap();
    }
}
