//! The public API: every item, field and method of the documentation, compared with a committed list, so that no change
//! is overlooked.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::args::Args;
use crate::workspace::Workspace;
use crate::{process, workspace};

/// The committed list. Its first line is the version of rustdoc that wrote its text.
const LIST: &str = "xtask/surface.txt";

const REFRESH: &str =
    "if that is right, run `cargo xtask surface`, commit the list and write of it in CHANGELOG.md";

/// `cargo xtask surface`: rewrites the list.
pub(crate) fn rewrite_list(args: Args) -> Result<()> {
    args.end()?;
    document(&Workspace::announced(None)?)?;
    let list = workspace::root().join(LIST);
    fs::write(&list, listed()?).with_context(|| format!("{LIST} cannot be written"))?;
    println!("wrote {LIST}");
    Ok(())
}

/// Builds the documentation, with warnings as errors, and compares its items with the list.
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    document(workspace)?;
    let known = fs::read_to_string(workspace::root().join(LIST))
        .with_context(|| format!("{LIST} is missing: {REFRESH}"))?;
    let now = listed()?;
    if known.lines().next() != now.lines().next() {
        eprintln!("WARNING: the surface is NOT COMPARED: {LIST} was made by another rustdoc");
        return Ok(());
    }
    let only_in = |a: &str, b: &str, sign| -> Vec<String> {
        a.lines()
            .filter(|line| !b.lines().any(|l| l == *line))
            .map(|l| format!("{sign} {l}"))
            .collect()
    };
    let changes = [only_in(&known, &now, '-'), only_in(&now, &known, '+')].concat();
    ensure!(changes.is_empty(), "the surface has changed:\n{}\n{REFRESH}", changes.join("\n"));
    println!("{} items, fields and methods, as {LIST} says", now.lines().count() - 1);
    Ok(())
}

fn document(workspace: &Workspace) -> Result<()> {
    // Pages of items that no longer exist would remain.
    let pages = workspace::target().join("doc/tch_amp");
    if pages.exists() {
        fs::remove_dir_all(&pages)
            .with_context(|| format!("{} cannot be removed", pages.display()))?;
    }
    process::run(workspace.cargo_full("doc").arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings"))
}

/// The version of rustdoc, followed by the sorted items.
fn listed() -> Result<String> {
    let version = process::read(std::process::Command::new("rustdoc").arg("--version"))?;
    let root = workspace::target().join("doc/tch_amp");
    let mut lines = Vec::new();
    for page in pages(&root)? {
        let html = fs::read_to_string(&page)
            .with_context(|| format!("{} cannot be read", page.display()))?;
        let place = page.strip_prefix(&root)?.with_extension("");
        let place = place.display().to_string().replace('/', "::");
        lines.extend(items(&html).into_iter().map(|item| format!("{place}: {item}")));
    }
    lines.sort();
    Ok(format!("{}\n{}\n", version.trim(), lines.join("\n")))
}

/// The pages of items, in all folders.
fn pages(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries =
        fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            found.extend(pages(&path)?);
        } else if name.ends_with(".html") && name != "index.html" && name != "all.html" {
            found.push(path);
        }
    }
    Ok(found)
}

/// The declaration of a page's item, and the headers of its methods and implementations, except for those that the
/// compiler or the standard library provides for every type.
fn items(html: &str) -> Vec<String> {
    let own = ["id=\"synthetic-implementations\"", "id=\"blanket-implementations\""];
    let end = own.iter().filter_map(|id| html.find(id)).min().unwrap_or(html.len());
    let html = &html[..end];
    let declared = between(html, "item-decl\"><code>", "</code></pre>");
    let headers = ["<h4 class=\"code-header\">", "<h3 class=\"code-header\">"]
        .into_iter()
        .zip(["</h4>", "</h3>"])
        .flat_map(|(start, end)| between(html, start, end));
    let headers =
        headers.filter(|header| !header.starts_with("fn ") && !header.starts_with("type "));
    declared.chain(headers).collect()
}

/// The texts between two markers.
fn between(html: &str, start: &str, end: &str) -> impl Iterator<Item = String> {
    html.split(start).skip(1).filter_map(move |rest| rest.split(end).next()).map(text)
}

/// The text of HTML without its tags, on one line.
fn text(html: &str) -> String {
    let mut text = String::new();
    let mut in_tag = false;
    for c in html.chars() {
        match c {
            '<' => in_tag = true,
            '>' => in_tag = false,
            c if !in_tag => text.push(c),
            _ => {}
        }
    }
    let entities =
        [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#39;", "'"), ("&nbsp;", " ")];
    for (entity, sign) in entities {
        text = text.replace(entity, sign);
    }
    let text = text.replace("&amp;", "&");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_read_off_a_page() {
        let page = "<pre class=\"rust item-decl\"><code>pub struct <a>A</a> { <span>/* private fields */</span> }</code></pre>\
            <h4 class=\"code-header\">pub fn f(\n    self,\n) -&gt; Result&lt;A&gt;</h4>\
            <h3 class=\"code-header\">impl Clone for A</h3><h4 class=\"code-header\">fn clone(&amp;self) -&gt; Self</h4>\
            <h2 id=\"blanket-implementations\"></h2><h3 class=\"code-header\">impl&lt;T&gt; Any for T</h3>";
        let expected = [
            "pub struct A { /* private fields */ }",
            "pub fn f( self, ) -> Result<A>",
            "impl Clone for A",
        ];
        assert_eq!(items(page), expected);
    }
}
