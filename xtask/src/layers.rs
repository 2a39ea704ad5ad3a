//! The layers of the crates' sources: no module, and no file, uses one that uses it, directly or through others.

mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path as FilePath;

use anyhow::{Context, Result, ensure};
use source::{Path, Source};

use crate::paths;

/// The files, by the paths of their modules from the root of the crate.
type Files = BTreeMap<Path, Source>;

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
    let mut files = Files::new();
    collect(&paths::root().join(source), &Path::new(), &mut files)?;
    let uses = uses(&files);
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

/// Reads the files of a module's folder.
fn collect(folder: &FilePath, module: &[String], files: &mut Files) -> Result<()> {
    let unreadable = || format!("{} cannot be read", folder.display());
    for entry in fs::read_dir(folder).with_context(unreadable)? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if stem == "tests" || (path.is_dir() && stem == "guide") {
            continue;
        }
        let inside: Path = module.iter().cloned().chain([stem.clone()]).collect();
        if path.is_dir() {
            collect(&path, &inside, files)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            let is_folder = stem == "mod" || stem == "lib";
            let module = if is_folder { module.to_vec() } else { inside };
            let text = fs::read_to_string(&path).with_context(unreadable)?;
            let source = Source::read(&module, &text);
            files.insert(module, source);
        }
    }
    Ok(())
}

/// The files that each file uses. What the files of a folder take from the folder's own file counts as their own: the
/// folder is one subject, of which that file is the door.
fn uses(files: &Files) -> Uses {
    let name = |module: &Path| module.join("/");
    // The root of the crate only hands on.
    let modules = files.iter().filter(|(module, _)| !module.is_empty());
    let others = |module: &Path, source: &Source| {
        let targets = source.used.iter().filter_map(|path| target(files, module, path));
        let others = targets.filter(|target| !module.starts_with(target));
        others.map(|target| name(&target)).collect()
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

/// How often what a path names may be handed on.
const MOST_DOORS: usize = 16;

/// The module whose file defines what a path names; `None` for a whole module and for what is not of this crate.
fn target(files: &Files, module: &Path, path: &[String]) -> Option<Path> {
    let (mut module, mut path) = (module.clone(), path.to_vec());
    for _ in 0..MOST_DOORS {
        (module, path) = nearest(files, module, path)?;
        let (first, rest) = path.split_first()?;
        let source = files.get(&module)?;
        if let Some(import) = source.imports.get(first) {
            path = import.iter().chain(rest).cloned().collect();
        } else if let Some(behind) = behind_glob(files, &module, first) {
            module = behind;
        } else {
            return Some(module);
        }
    }
    None
}

/// The module whose names a file brings in with a name that the file itself does not define.
fn behind_glob(files: &Files, module: &Path, name: &String) -> Option<Path> {
    let source = files.get(module).filter(|source| !source.defined.contains(name))?;
    let globs = source.globs.iter().filter_map(|glob| nearest(files, module.clone(), glob.clone()));
    let has = |source: &Source| source.defined.contains(name) || source.imports.contains_key(name);
    globs.map(|(other, _)| other).find(|other| files.get(other).is_some_and(has))
}

/// Follows a path through the modules, as far as these are files, and returns the last of them and the rest of the
/// path.
fn nearest(files: &Files, mut module: Path, path: Path) -> Option<(Path, Path)> {
    let mut rest = path.into_iter().peekable();
    if rest.next_if(|first| first == "crate").is_some() {
        module.clear();
    }
    while let Some(next) = rest.peek() {
        let child: Path = module.iter().chain([next]).cloned().collect();
        if !files.contains_key(&child) {
            break;
        }
        module = child;
        rest.next();
    }
    Some((module, rest.collect()))
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

    #[test]
    fn the_source_has_layers() {
        check().unwrap();
    }

    fn path(file: &str) -> Path {
        file.split('/').map(str::to_owned).collect()
    }

    fn files(texts: &[(&str, &str)]) -> Files {
        let root = (Path::new(), Source::read(&[], "pub use a::one::One;"));
        let read = |(file, text): &(&str, &str)| (path(file), Source::read(&path(file), text));
        texts.iter().map(read).chain([root]).collect()
    }

    /// The circles of these files and of their modules, with their members in one text.
    fn found(texts: &[(&str, &str)]) -> [Vec<String>; 2] {
        let uses = uses(&files(texts));
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
