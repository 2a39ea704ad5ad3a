//! The layers of the crates' sources: no module, and no file, uses one that uses it, directly or through others.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};

use crate::paths;
use crate::source::{Path, Source, Sources};

/// What each module or file uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

/// The sources whose files are checked.
const SOURCES: [&str; 6] =
    ["src", "recipes/src", "run-report/src", "testbench/src", "torch-files/src", "xtask/src"];

/// Fails if modules or files use one another in a circle, and names them.
pub(crate) fn check() -> Result<()> {
    SOURCES.into_iter().try_for_each(check_source)
}

fn check_source(source: &str) -> Result<()> {
    let uses = uses(&Sources::read(&paths::root().join(source))?);
    let modules = of_modules(&uses);
    for (what, circles) in [("modules", circles(&modules)), ("files", circles(&uses))] {
        ensure!(circles.is_empty(), "these {what} of {source} use one another:{}", list(&circles));
    }
    let (modules, files) = (modules.len(), uses.len());
    println!("{source}: {modules} modules and {files} files, each above those that it uses");
    Ok(())
}

fn list(circles: &[BTreeSet<String>]) -> String {
    circles.iter().fold(String::new(), |text, circle| {
        format!("{text}\n  {}", Vec::from_iter(circle.iter().map(String::as_str)).join(", "))
    })
}

/// The files that each file uses. What the files of a folder take from the folder's own file counts as their own: the
/// folder is one subject, of which that file is the door.
fn uses(sources: &Sources) -> Uses {
    let name = |module: &Path| module.join("/");
    // The root of the crate only hands on.
    let modules = sources.0.iter().filter(|(module, _)| !module.is_empty());
    let others = |module: &Path, source: &Source| {
        let targets = source.used.iter().filter_map(|path| sources.target(module, path));
        let others = targets.filter(|(target, _)| !module.starts_with(target));
        others.map(|(target, _)| name(&target)).collect()
    };
    modules.map(|(module, source)| (name(module), others(module, source))).collect()
}

/// The modules at the root of the crate that each of them uses.
fn of_modules(files: &Uses) -> Uses {
    let module = |file: &String| file.split('/').next().unwrap_or_default().to_owned();
    let mut uses = Uses::new();
    for (file, others) in files {
        let here = module(file);
        let others = others.iter().map(module).filter(|other| *other != here);
        uses.entry(here.clone()).or_default().extend(others);
    }
    uses
}

/// The circles: each with all that use one another, directly or through others.
fn circles(uses: &Uses) -> Vec<BTreeSet<String>> {
    let below: BTreeMap<&String, BTreeSet<&String>> =
        uses.keys().map(|one| (one, below(uses, one))).collect();
    let together = |one: &String| {
        let with = below[one].iter().filter(|other| below[*other].contains(one));
        with.map(|other| (*other).clone()).collect::<BTreeSet<_>>()
    };
    let circles: BTreeSet<_> =
        uses.keys().map(together).filter(|circle| circle.len() > 1).collect();
    circles.into_iter().collect()
}

/// All that one uses, directly or through others.
fn below<'a>(uses: &'a Uses, one: &String) -> BTreeSet<&'a String> {
    let mut found = BTreeSet::new();
    let mut left: Vec<&String> = uses[one].iter().collect();
    while let Some(next) = left.pop() {
        if let Some((next, others)) = uses.get_key_value(next)
            && found.insert(next)
        {
            left.extend(others);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(file: &str) -> Path {
        file.split('/').map(str::to_owned).collect()
    }

    fn sources(texts: &[(&str, &str)]) -> Sources {
        let read = |module: Path, text| (module.clone(), Source::read(&module, text).unwrap());
        let root = read(Path::new(), "pub use a::one::One;");
        Sources(texts.iter().map(|(file, text)| read(path(file), text)).chain([root]).collect())
    }

    /// The circles of these files and of their modules, with their members in one text.
    fn found(texts: &[(&str, &str)]) -> [Vec<String>; 2] {
        let uses = uses(&sources(texts));
        [circles(&uses), circles(&of_modules(&uses))]
            .map(|found| found.iter().map(|all| Vec::from_iter(all.clone()).join(" ")).collect())
    }

    #[test]
    fn a_circle_is_found_through_the_files_that_hand_on() {
        let [files, modules] = found(&[
            ("a", "pub use one::One;\npub use two::*;"),
            ("a/one", "use super::two;\npub struct One;\nfn f() { two::g() }"),
            ("a/two", "use crate::c::H;\npub fn g() {}"),
            ("c", "pub struct H;\nfn f() { let _ = crate::One; }"),
            ("d", "fn f() { crate::a::g() }"),
        ]);
        assert_eq!((files, modules), (vec!["a/one a/two c".to_owned()], vec!["a c".to_owned()]));
    }

    #[test]
    fn a_door_is_no_step_of_a_circle_and_neither_is_what_tests_use() {
        let [files, modules] = found(&[
            ("a", "pub use one::One;\npub const MOST: usize = 1;\nfn f() { one::One::new() }"),
            ("a/one", "use super::MOST;\npub struct One;"),
            ("b", "use crate::a::One;\npub struct B;"),
            ("c", "use crate::b::B;\n#[cfg(test)]\nmod tests { use crate::d::D; }"),
            ("d", "use crate::c;\npub struct D;\nfn f() { c::g() }"),
        ]);
        assert!(files.is_empty() && modules.is_empty(), "{files:?} {modules:?}");
    }
}
