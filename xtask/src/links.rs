//! The links between the Markdown pages of the repository, also as targets in the documentation.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{paths, pictures};

/// The page that defines the targets in the documentation for links of the pages that it shows.
const TARGETS: &str = "src/guide/links.md";

/// The page that leads to every example and recipe.
const RECIPES: &str = "docs/recipes.md";

/// Folders without pages of this repository.
const SKIPPED: [&str; 2] = [".git", "target"];

/// Fails if a link leads nowhere, or would lead nowhere on the pages of the documentation.
pub(crate) fn check() -> Result<()> {
    let root = paths::root();
    let mut pages = Vec::new();
    find(&root, "md", &mut pages)?;
    pages.sort();
    let mut targets = labels(&read(&root.join(TARGETS))?);
    targets.extend(labels(&read(&root.join(pictures::TARGETS))?));
    let mut broken = Vec::new();
    for page in &pages {
        let text = read(page)?;
        let name = page.strip_prefix(&root).unwrap_or(page).display().to_string();
        let links = links(&text);
        broken.extend(
            links
                .iter()
                .filter(|link| link.is_relative() && !link.exists(page))
                .map(|link| format!("{name}: there is no {}", link.target)),
        );
        if is_shown(&name) {
            broken.extend(
                links.iter().filter(|link| link.is_relative() && !link.is_among(&targets)).map(
                    |link| {
                        format!(
                            "{name}: {} is not in {TARGETS}, as the documentation wants",
                            link.target
                        )
                    },
                ),
            );
        }
    }
    let sources = Sources::read()?;
    for page in guide()? {
        let text = read(&page)?;
        if sources.define(&text) != text {
            let name = page.strip_prefix(&root).unwrap_or(&page).display();
            broken.push(format!("{name}: links are not defined: run `cargo xtask fmt`"));
        }
    }
    let examples = examples(&root)?;
    let recipes = read(&root.join(RECIPES))?;
    let missing = examples.iter().filter(|example| !recipes.contains(*example));
    broken.extend(missing.map(|example| format!("{RECIPES}: it does not link to {example}")));
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    pictures::check()?;
    println!("{} pages", pages.len());
    Ok(())
}

/// Precedes the definitions at the end of a page that are made from [`TARGETS`].
const GENERATED: &str = "<!-- generated: links -->";

/// Defines the links of each page of the guide to items of the crate, for those who read it in the repository: rustdoc
/// takes the definitions of [`TARGETS`], which come first.
pub(crate) fn write() -> Result<()> {
    let sources = Sources::read()?;
    for page in guide()? {
        let text = read(&page)?;
        let defined = sources.define(&text);
        if defined != text {
            fs::write(&page, defined).with_context(|| page.display().to_string())?;
        }
    }
    Ok(())
}

/// The pages of the guide.
fn guide() -> Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(paths::root().join("docs"))? {
        pages.push(entry?.path());
    }
    pages.retain(|page| page.extension().is_some_and(|kind| kind == "md"));
    pages.sort();
    Ok(pages)
}

/// The sources of the crate, and the targets of links in its documentation.
struct Sources {
    /// Paths from a page of the guide, and their lines that define public items or begin a block of methods.
    files: Vec<(String, String)>,
    /// Labels as they are written, and paths in Rust.
    targets: Vec<(String, String)>,
}

impl Sources {
    fn read() -> Result<Self> {
        let root = paths::root();
        let mut paths = Vec::new();
        find(&root.join("src"), "rs", &mut paths)?;
        paths.sort();
        let mut files = Vec::new();
        for path in paths {
            let name = path.strip_prefix(&root).unwrap_or(&path).display().to_string();
            let text = read(&path)?;
            let lines =
                text.lines().filter(|line| line.contains("pub ") || line.starts_with("impl"));
            files.push((format!("../{name}"), lines.collect::<Vec<_>>().join("\n")));
        }
        let targets = read(&root.join(TARGETS))?;
        let targets = targets.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: "));
        let targets = targets.map(|(label, target)| (label.to_owned(), target.trim().to_owned()));
        Ok(Self { files, targets: targets.collect() })
    }

    /// The text with a definition of each link that the page does not define itself.
    fn define(&self, text: &str) -> String {
        let (before, after) = text.split_once(GENERATED).unwrap_or((text, ""));
        // What an author has written below the block moves above it.
        let is_generated = |line: &str| line.is_empty() || line.contains("]: ../src/");
        let after =
            after.lines().filter(|line| !is_generated(line)).map(|line| format!("{line}\n"));
        let own = format!("{}\n{}", before.trim_end(), after.collect::<String>());
        let own = own.trim_end();
        let defined = labels(own);
        let words: String = prose(own).map(|line| format!("{line}\n")).collect();
        let is_missing = |label: &str| {
            !defined.contains(&label.to_lowercase()) && words.contains(&format!("[{label}]"))
        };
        let missing = self.targets.iter().filter(|(label, _)| is_missing(label));
        let lines = missing
            .filter_map(|(label, target)| Some(format!("[{label}]: {}\n", self.place(target)?)));
        let lines: String = lines.collect();
        if lines.is_empty() { format!("{own}\n") } else { format!("{own}\n\n{GENERATED}\n{lines}") }
    }

    /// The file that defines an item: for a method, one with a block of its type.
    fn place(&self, target: &str) -> Option<String> {
        if target.contains("://") {
            return Some(target.to_owned());
        }
        let path = target.trim_start_matches("mod@").strip_prefix("crate::")?;
        let path = path.trim_end_matches("()").trim_end_matches('!');
        let parts: Vec<&str> = path.split("::").collect();
        let found = match parts[..] {
            [.., of, name] if of.starts_with(char::is_uppercase) => {
                self.method(of, name).or_else(|| self.defining(of))
            }
            [.., name]
                if target.starts_with("mod@")
                    || parts.len() == 1 && self.defining(name).is_none() =>
            {
                None
            }
            [.., name] => self.defining(name),
            [] => None,
        };
        let module = || {
            let names = [format!("../src/{}/mod.rs", parts[0]), format!("../src/{}.rs", parts[0])];
            names.into_iter().find(|name| self.files.iter().any(|(file, _)| file == name))
        };
        found.or_else(module)
    }

    /// The first file that implements a public method, or a field, of a type.
    fn method(&self, of: &str, name: &str) -> Option<String> {
        let blocks =
            [format!("impl {of} "), format!("impl {of}<"), format!("> {of}<"), format!("> {of} ")];
        let has_block = |text: &str| {
            text.lines().any(|line| {
                line.starts_with("impl") && blocks.iter().any(|block| line.contains(block.as_str()))
            })
        };
        let defines = |text: &str| has_block(text) && defines(text, name);
        self.files.iter().find(|(_, text)| defines(text)).map(|(file, _)| file.clone())
    }

    /// The first file that defines a public item of this name, if possible outside of blocks: a method may have the name
    /// of a function. A macro may define an item, too.
    fn defining(&self, name: &str) -> Option<String> {
        let is_outside =
            |text: &str| text.lines().any(|line| line.starts_with("pub ") && defines(line, name));
        let outside = self.files.iter().find(|(_, text)| is_outside(text));
        let anywhere = || self.files.iter().find(|(_, text)| defines(text, name));
        outside.or_else(anywhere).map(|(file, _)| file.clone())
    }
}

/// Whether a source has a public item of this name.
fn defines(text: &str, name: &str) -> bool {
    let kinds = ["struct", "enum", "trait", "fn", "const", "type"];
    let ends = ["(", "<", " ", ":", ";"];
    kinds
        .iter()
        .any(|kind| ends.iter().any(|end| text.contains(&format!("pub {kind} {name}{end}"))))
}

/// Whether rustdoc shows the page: the README and the pages of the guide.
fn is_shown(page: &str) -> bool {
    let mut parts = page.split('/');
    page == "README.md" || (parts.next() == Some("docs") && parts.count() == 1)
}

fn read(page: &Path) -> Result<String> {
    fs::read_to_string(page).with_context(|| format!("{} cannot be read", page.display()))
}

/// Adds the files of this kind in a folder and its subfolders. Symbolic links to folders are not followed.
fn find(folder: &Path, kind: &str, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if !SKIPPED.iter().any(|name| entry.file_name() == *name) {
                find(&path, kind, found)?;
            }
        } else if path.extension().is_some_and(|is| is == kind) {
            found.push(path);
        }
    }
    Ok(())
}

fn examples(root: &Path) -> Result<Vec<String>> {
    let mut examples = Vec::new();
    for folder in ["examples", "recipes/examples"] {
        for entry in fs::read_dir(root.join(folder))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            // The demo is not a pattern to copy; the README and the page name its command.
            if name != "demo.rs" {
                examples.push(format!("{folder}/{name}"));
            }
        }
    }
    Ok(examples)
}

/// One link of a page.
#[derive(Debug, PartialEq, Eq)]
struct Link {
    /// The label that a definition defines; `None` for a link in the text.
    label: Option<String>,
    target: String,
}

impl Link {
    fn is_relative(&self) -> bool {
        !["://", "::", "data:"].iter().any(|absolute| self.target.contains(absolute))
    }

    fn exists(&self, page: &Path) -> bool {
        let (file, heading) = self.target.split_once('#').unwrap_or((&self.target, ""));
        let folder = page.parent().unwrap_or(page);
        let path = if file.is_empty() { page.to_owned() } else { folder.join(file) };
        path.exists() && (heading.is_empty() || has_heading(&path, heading))
    }

    fn is_among(&self, labels: &[String]) -> bool {
        self.label.as_ref().is_some_and(|label| labels.contains(label))
    }
}

fn has_heading(page: &Path, wanted: &str) -> bool {
    let text = fs::read_to_string(page).unwrap_or_default();
    prose(&text).filter_map(|line| line.strip_prefix('#')).any(|line| anchor(line) == wanted)
}

/// The anchor of a heading, in the form that rustdoc and hosts of repositories use.
fn anchor(heading: &str) -> String {
    let words = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = words.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The lines outside of code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        is_code ^= fence;
        !fence && !is_code
    })
}

/// The labels that a page defines.
fn labels(text: &str) -> Vec<String> {
    links(text).into_iter().filter_map(|link| link.label).collect()
}

/// The definitions `[label]: target`, and the links `[text](target)`.
fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for line in prose(text) {
        let definition = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
        if let Some((label, target)) = definition {
            links
                .push(Link { label: Some(label.to_lowercase()), target: target.trim().to_owned() });
            continue;
        }
        let rests = line.match_indices("](").map(|(at, mark)| &line[at + mark.len()..]);
        let targets = rests.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        links.extend(targets.map(|target| Link { label: None, target: target.to_owned() }));
    }
    links
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_definitions_are_found_outside_of_code() {
        let text = "See [a](b.md#c) and [`D`].\n```text\n[no](link)\n```\n[`D`]: ../d.rs\n";
        let inline = Link { label: None, target: "b.md#c".into() };
        let defined = Link { label: Some("`d`".into()), target: "../d.rs".into() };
        assert_eq!(links(text), [inline, defined]);
    }

    #[test]
    fn an_anchor_is_the_heading_in_small_letters() {
        assert_eq!(anchor("## What to watch for"), "what-to-watch-for");
        assert_eq!(
            anchor("# In-place operations and `out=` variants"),
            "in-place-operations-and-out-variants"
        );
    }

    #[test]
    fn the_documentation_shows_the_readme_and_the_guide() {
        assert!(is_shown("README.md") && is_shown("docs/errors.md"));
        assert!(!is_shown("docs/measurements/cpu.md") && !is_shown("CONTRIBUTING.md"));
    }

    #[test]
    fn links_to_items_are_defined_by_their_files() {
        let sources = Sources::read().unwrap();
        let text = "A [`GradScaler::backward`], a [`Muon`], `[`Ema`]` in code and [own].\n\n[own]: own.md\n";
        let backward = "[`GradScaler::backward`]: ../src/scaler/grad_scaler.rs";
        let defined = sources.define(text);
        assert!(defined.starts_with(text) && defined.contains(backward), "{defined}");
        assert_eq!(sources.define(&defined), defined);
        for (target, place) in [
            ("crate::gradients::clip_grad_norm()", "gradients/clip.rs"),
            ("crate::Amp", "amp.rs"),
            ("crate::GradScaler::step", "scaler/step.rs"),
            ("crate::scaler::ScalerError::EmptyState", "error/scaler.rs"),
            ("crate::GradScaler::agree_over", "distributed/amp.rs"),
            ("crate::checkpoint::Restore::rngs", "distributed/checkpoint.rs"),
            ("mod@crate::optim", "optim/mod.rs"),
        ] {
            assert_eq!(sources.place(target).unwrap(), format!("../src/{place}"), "{target}");
        }
    }

    #[test]
    fn every_link_leads_somewhere() {
        check().unwrap();
    }
}
