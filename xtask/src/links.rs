//! The links between the Markdown pages of the repository, also as targets in the documentation.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::source::Sources;
use crate::{paths, pictures};

/// The page that defines the targets in the documentation for links of the pages that it shows.
const TARGETS: &str = "src/guide/links.md";

/// The page that leads to every example and recipe.
const RECIPES: &str = "docs/recipes.md";

/// The lists of all pages, in the same groups.
const README: &str = "README.md";
const GUIDE: &str = "src/guide.rs";

/// The groups of the lists.
const GROUPS: [&str; 4] = ["Start", "Train", "Understand", "Look up"];

/// How each page of the guide begins, after its title.
const BEGINNING: &str = "This page is for those who";

/// Fails if a link leads nowhere, or would lead nowhere on the pages of the documentation.
///
/// `lychee --offline --include-fragments` reports the same links that lead nowhere, which take some twenty lines here.
/// It is built from 379 crates, too many for a check of each day.
pub(crate) fn check() -> Result<()> {
    let pages = paths::files_below("", ".md")?;
    let targets = labels(&(read(TARGETS)? + &read(pictures::TARGETS)?));
    let mut broken = Vec::new();
    for page in &pages {
        let name = paths::relative(page);
        for link in links(&paths::read(page)?).into_iter().filter(Link::is_relative) {
            let target = &link.target;
            if !link.exists(page) {
                broken.push(format!("{name}: there is no {target}"));
            }
            if is_shown(&name) && !link.label.is_some_and(|label| targets.contains(&label)) {
                let wanted = format!("is not in {TARGETS}, as the documentation wants");
                broken.push(format!("{name}: {target} {wanted}"));
            }
        }
    }
    let definitions = Definitions::read()?;
    for (page, text, defined) in definitions.pages()? {
        let name = paths::relative(&page);
        if text != defined {
            broken.push(format!("{name}: links are not defined: run `cargo xtask fmt`"));
        }
        if !text.lines().nth(2).is_some_and(|line| line.starts_with(BEGINNING)) {
            broken.push(format!("{name}: it does not begin with `{BEGINNING}`"));
        }
    }
    let (readme, guide) = (read(README)?, read(GUIDE)?);
    let undefined = definitions.undefined(&readme);
    broken.extend(undefined.map(|(label, _)| format!("{README}: what is [{label}]?")));
    for group in GROUPS {
        let [readme, guide] = [(&readme, ":**", "\n\n"), (&guide, "** |", " |\n")]
            .map(|(text, after, end)| listed(text, &format!("**{group}{after}"), end));
        if readme.is_empty() || readme != guide {
            broken.push(format!("{group}: {README} lists {readme:?}, and {GUIDE} {guide:?}"));
        }
    }
    let recipes = read(RECIPES)?;
    let missing = examples()?.into_iter().filter(|example| !recipes.contains(example));
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
    for (page, text, defined) in Definitions::read()?.pages()? {
        if defined != text {
            paths::write(&page, &defined)?;
        }
    }
    Ok(())
}

/// The targets of links in the documentation, and where the sources define them.
struct Definitions {
    sources: Sources,
    /// Labels as they are written, and paths in Rust.
    targets: Vec<(String, String)>,
}

impl Definitions {
    fn read() -> Result<Self> {
        let targets = read(TARGETS)?;
        let targets = targets.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: "));
        let targets = targets.map(|(label, target)| (label.to_owned(), target.trim().to_owned()));
        Ok(Self { sources: Sources::read(&paths::root().join("src"))?, targets: targets.collect() })
    }

    /// The pages of the guide, with their texts as they are and as they should be.
    fn pages(&self) -> Result<Vec<(PathBuf, String, String)>> {
        let pages = paths::files("docs", ".md")?.into_iter().map(|page| {
            let text = paths::read(&page)?;
            let defined = self.define(&text).with_context(|| paths::relative(&page))?;
            Ok((page, text, defined))
        });
        pages.collect()
    }

    /// The targets of labels that rustdoc defines, and that a reader of the text in the repository sees as brackets.
    fn undefined<'a>(&'a self, text: &str) -> impl Iterator<Item = &'a (String, String)> {
        let defined = labels(text);
        let words: String = prose(text).map(|line| format!("{line} ")).collect();
        self.targets.iter().filter(move |(label, _)| {
            let link = format!("[{label}]");
            let mut rests = words.split(&link).skip(1);
            !defined.contains(&label.to_lowercase())
                && rests.any(|rest| !rest.starts_with(['[', '(']))
        })
    }

    /// The text with a definition of each link that the page does not define itself.
    fn define(&self, text: &str) -> Result<String> {
        let (before, after) = text.split_once(GENERATED).unwrap_or((text, ""));
        // What an author has written below the block moves above it.
        let is_generated = |line: &str| line.is_empty() || line.contains("]: ../src/");
        let after =
            after.lines().filter(|line| !is_generated(line)).map(|line| format!("{line}\n"));
        let own = format!("{}\n{}", before.trim_end(), after.collect::<String>());
        let own = own.trim_end();
        let lines = self.undefined(own).map(|(label, target)| {
            let missing = || format!("no source has {target}: define [{label}]");
            Ok(format!("[{label}]: {}\n", self.place(target).with_context(missing)?))
        });
        let lines = lines.collect::<Result<String>>()?;
        let mark = if lines.is_empty() { String::new() } else { format!("\n{GENERATED}\n") };
        Ok(format!("{own}\n{mark}{lines}"))
    }

    /// The file that defines an item, as a page of the guide links to it.
    fn place(&self, target: &str) -> Option<String> {
        if target.contains("://") {
            return Some(target.to_owned());
        }
        let module = target.strip_prefix("mod@");
        let path = module.unwrap_or(target).trim_end_matches(['(', ')', '!']).split("::");
        let path: Vec<_> = path.map(str::to_owned).collect();
        let file = self.sources.file(&path, module.is_some())?;
        Some(format!("../{}", paths::relative(file)))
    }
}

/// What stands in brackets in the group of a list.
fn listed(text: &str, start: &str, end: &str) -> Vec<String> {
    let group = text.split_once(start).and_then(|(_, rest)| rest.split_once(end));
    let group = group.map_or("", |(group, _)| group).replace('\n', " ");
    let brackets = group.split('[').skip(1).filter_map(|rest| rest.split_once(']'));
    brackets.map(|(label, _)| label.to_owned()).collect()
}

/// Whether rustdoc shows the page: the README and the pages of the guide.
fn is_shown(page: &str) -> bool {
    let mut parts = page.split('/');
    page == README || (parts.next() == Some("docs") && parts.count() == 1)
}

fn read(page: &str) -> Result<String> {
    paths::read(&paths::root().join(page))
}

/// The examples that [`RECIPES`] has to link to.
fn examples() -> Result<Vec<String>> {
    let mut examples = Vec::new();
    for folder in ["examples", "recipes/examples"] {
        let names = paths::files(folder, ".rs")?.into_iter().map(|file| paths::stem(&file));
        // The demo is not a pattern to copy; the README and the page name its command.
        let names = names.filter(|name| name != "demo");
        examples.extend(names.map(|name| format!("{folder}/{name}.rs")));
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
}

fn has_heading(page: &Path, wanted: &str) -> bool {
    let text = paths::read(page).unwrap_or_default();
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
        // The first one of an unclosed pair goes on, and leads nowhere.
        let rests = line.match_indices("](").map(|(at, mark)| &line[at + mark.len()..]);
        let targets = rests.filter_map(|rest| rest.split_once(')'));
        links.extend(targets.map(|(target, _)| Link { label: None, target: target.to_owned() }));
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
        let sources = Definitions::read().unwrap();
        let text = "A [`GradScaler::backward`], a [`Muon`], `[`Ema`]` in code and [own].\n\n[own]: own.md\n";
        let backward = "[`GradScaler::backward`]: ../src/scaler/grad_scaler.rs";
        let defined = sources.define(text).unwrap();
        assert!(defined.starts_with(text) && defined.contains(backward), "{defined}");
        assert_eq!(sources.define(&defined).unwrap(), defined);
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
    fn a_label_without_a_definition_is_found() {
        let definitions = Definitions::read().unwrap();
        let text = "[tutorial], [`Ema`] and [several\ndevices].\n\n[tutorial]: tutorial.md\n";
        let labels = definitions.undefined(text).map(|(label, _)| label.as_str());
        assert_eq!(labels.collect::<Vec<_>>(), ["`Ema`", "several devices"]);
    }

    #[test]
    fn a_group_has_what_stands_in_brackets() {
        let list =
            "**Start:** the [tutorial] · a [CUDA\nlibtorch][libtorch]\n\n**Train:** [losses]\n\n";
        assert_eq!(listed(list, "**Start:**", "\n\n"), ["tutorial", "CUDA libtorch", "libtorch"]);
        assert_eq!(listed(list, "**Train:**", "\n\n"), ["losses"]);
        assert!(listed(list, "**End:**", "\n\n").is_empty());
    }
}
