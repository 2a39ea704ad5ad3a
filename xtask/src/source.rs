//! The sources of a crate: what each file names, and which file defines what a path names. Tests, and what only the
//! documentation uses, do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::mem;
use std::path::{Path as FilePath, PathBuf};

use anyhow::{Context, Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The segments of a path, which begins with `crate` or in the module that names it.
pub(crate) type Path = Vec<String>;

/// The names of a file.
#[derive(Debug, Default)]
pub(crate) struct Source {
    file: PathBuf,
    /// What the file brings in by `use`, under the names that it has here.
    imports: BTreeMap<String, Path>,
    /// The modules of which it brings in everything.
    globs: Vec<Path>,
    /// What it defines.
    defined: BTreeSet<String>,
    /// The functions of types, each behind what stands between its `impl` and the braces.
    implemented: BTreeSet<(String, String)>,
    /// The paths that it uses: all but those that it only hands on by `pub use`.
    pub(crate) used: BTreeSet<Path>,
}

impl Source {
    /// Reads the text of a module.
    pub(crate) fn read(module: &[String], text: &str) -> Result<Self> {
        let mut source = Self::default();
        let tokens = text.parse().map_err(|error| anyhow!("this is no Rust: {error}"))?;
        source.add(tokens, module, &[]);
        Ok(source)
    }

    /// Adds what is in a file, in a module inside of it or between other brackets, such as those of an implementation
    /// for a type.
    fn add(&mut self, stream: TokenStream, module: &[String], implemented: &[String]) {
        let tokens = Vec::from_iter(stream);
        let mut tokens = Tokens(&tokens);
        let (mut is_public, mut header) = (false, Vec::new());
        while let Some(token) = tokens.next() {
            let was_public = mem::take(&mut is_public);
            let word = match token {
                TokenTree::Group(group) => {
                    let is_body = group.delimiter() == Delimiter::Brace;
                    let header = if is_body { mem::take(&mut header) } else { Vec::new() };
                    self.add(group.stream(), module, &header);
                    continue;
                }
                TokenTree::Ident(word) => word.to_string(),
                TokenTree::Punct(mark) if mark.as_char() == '#' => {
                    if tokens.attribute_is_of_other_builds() {
                        tokens.skip_item();
                    }
                    continue;
                }
                _ => continue,
            };
            match word.as_str() {
                "pub" => {
                    is_public = true;
                    tokens.group(Delimiter::Parenthesis);
                }
                "use" => self.add_use(&mut tokens, module, was_public),
                "impl" => header = tokens.header(),
                "mod" => {
                    let inside = tokens.name().map(|name| [module, &[name]].concat());
                    if let (Some(inside), Some(body)) = (inside, tokens.group(Delimiter::Brace)) {
                        self.add(body, &inside, &[]);
                    }
                }
                "fn" | "struct" | "enum" | "trait" | "type" | "const" | "static" | "union" => {
                    let name = Tokens(tokens.0).name();
                    let of = implemented.iter().cloned();
                    self.implemented.extend(of.filter_map(|of| Some((of, name.clone()?))));
                    self.defined.extend(name);
                }
                _ => {
                    self.used.insert(absolute(module, tokens.path(word)));
                }
            }
        }
    }

    fn add_use(&mut self, tokens: &mut Tokens<'_>, module: &[String], is_public: bool) {
        let mut found = Vec::new();
        tokens.imports(&Path::new(), &mut found);
        for (name, path) in found {
            let path = absolute(module, path);
            if name.as_deref() == Some("*") {
                self.globs.push(path);
                continue;
            }
            if !is_public {
                self.used.insert(path.clone());
            }
            self.imports.extend(name.map(|name| (name, path)));
        }
    }

    fn has(&self, name: &str) -> bool {
        self.defined.contains(name) || self.imports.contains_key(name)
    }
}

/// A path from the root of the crate, unless it begins with a name that is known only in the module.
fn absolute(module: &[String], path: Path) -> Path {
    if !["self", "super"].contains(&path.first().map_or("", String::as_str)) {
        return path;
    }
    let steps = path.iter().take_while(|step| *step == "super" || *step == "self").count();
    let (steps, rest) = path.split_at(steps);
    let up = steps.iter().filter(|step| *step == "super").count();
    let module = &module[..module.len().saturating_sub(up)];
    [&["crate".to_owned()], module, rest].concat()
}

/// What is left of a list of tokens, which has no comments.
struct Tokens<'a>(&'a [TokenTree]);

impl<'a> Tokens<'a> {
    fn next(&mut self) -> Option<&'a TokenTree> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// Takes a name, if one comes next.
    fn name(&mut self) -> Option<String> {
        let [TokenTree::Ident(name), rest @ ..] = self.0 else { return None };
        self.0 = rest;
        Some(name.to_string())
    }

    /// Takes these marks, if they come next.
    fn marks(&mut self, marks: &str) -> bool {
        let come = |(token, mark): (&TokenTree, char)| match token {
            TokenTree::Punct(found) => found.as_char() == mark,
            _ => false,
        };
        let found = self.0.len() >= marks.len() && self.0.iter().zip(marks.chars()).all(come);
        if found {
            self.0 = &self.0[marks.len()..];
        }
        found
    }

    /// Takes what is between such brackets, if they come next.
    fn group(&mut self, delimiter: Delimiter) -> Option<TokenStream> {
        let [TokenTree::Group(group), rest @ ..] = self.0 else { return None };
        (group.delimiter() == delimiter).then(|| {
            self.0 = rest;
            group.stream()
        })
    }

    /// Takes the rest of an attribute, and returns whether it is `#[cfg(test)]` or `#[cfg(doc)]`.
    fn attribute_is_of_other_builds(&mut self) -> bool {
        self.marks("!");
        let words = self.group(Delimiter::Bracket).unwrap_or_default().to_string();
        ["cfg (test)", "cfg (doc)", "cfg(test)", "cfg(doc)"].contains(&words.as_str())
    }

    fn skip_item(&mut self) {
        let mut is_use = false;
        while let Some(token) = self.next() {
            match token {
                TokenTree::Ident(word) => is_use |= word == "use",
                TokenTree::Punct(mark) if mark.as_char() == ';' => return,
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && !is_use => {
                    return;
                }
                _ => {}
            }
        }
    }

    /// Takes the rest of a path that begins with this name.
    fn path(&mut self, first: String) -> Path {
        let mut path = vec![first];
        while self.marks("::") {
            let Some(name) = self.name() else { break };
            path.push(name);
        }
        path
    }

    /// What stands between an `impl` and its braces, or nothing if that is a trait for a type.
    fn header(&self) -> Vec<String> {
        let words = self.0.iter().map_while(|token| match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => None,
            token => Some(token.to_string()),
        });
        let words: Vec<_> = words.collect();
        let has_trait = words.windows(2).any(|pair| pair[0] == "for" && pair[1] != "<");
        if has_trait { Vec::new() } else { words }
    }

    /// Takes what comes after `use`: each path with the name that it has here, `*` for all that a module has, and
    /// `None` for what has no name.
    fn imports(&mut self, before: &Path, found: &mut Vec<(Option<String>, Path)>) {
        let mut path = before.clone();
        loop {
            match self.0.first() {
                Some(TokenTree::Group(group)) => {
                    let inside = Vec::from_iter(group.stream());
                    let mut inside = Tokens(&inside);
                    while !inside.0.is_empty() {
                        inside.imports(&path, found);
                        inside.marks(",");
                    }
                    self.next();
                    return;
                }
                Some(TokenTree::Ident(word)) if word == "as" => {
                    self.next();
                    let name = self.name().filter(|name| name != "_");
                    return found.push((name, path));
                }
                // The module that the list is of.
                Some(TokenTree::Ident(word)) if word == "self" && !path.is_empty() => {}
                Some(TokenTree::Ident(word)) => path.push(word.to_string()),
                Some(TokenTree::Punct(mark)) if mark.as_char() == ':' => {}
                Some(TokenTree::Punct(mark)) if mark.as_char() == '*' => {
                    self.next();
                    return found.push((Some("*".to_owned()), path));
                }
                _ => return found.push((path.last().cloned(), path)),
            }
            self.next();
        }
    }
}

/// How often what a path names may be handed on.
const MOST_DOORS: usize = 16;

/// The files of a crate, by the paths of their modules from its root.
#[derive(Debug)]
pub(crate) struct Sources(pub(crate) BTreeMap<Path, Source>);

impl Sources {
    /// Reads all files of a folder.
    pub(crate) fn read(folder: &FilePath) -> Result<Self> {
        let mut files = BTreeMap::new();
        collect(folder, &Path::new(), &mut files)?;
        Ok(Self(files))
    }

    /// The module whose file defines what a path names in another module, and the part of the path that is inside of
    /// that file; `None` for a whole module.
    pub(crate) fn target(&self, module: &[String], path: &[String]) -> Option<(Path, Path)> {
        let mut place = self.nearest(module, path);
        for _ in 0..MOST_DOORS {
            if place.1.is_empty() {
                return None;
            }
            match self.behind(&place) {
                Some((module, path)) => place = self.nearest(&module, &path),
                None => return Some(place),
            }
        }
        None
    }

    /// The file that defines what a path from the root names. For a method it is one with a block of its type. A last
    /// segment that is a module as well as an item is the item, unless `is_module`.
    pub(crate) fn file(&self, path: &[String], is_module: bool) -> Option<&FilePath> {
        let (last, above) = path.split_last()?;
        let (module, mut inside) = self.nearest(&[], above);
        let is_item = !inside.is_empty() || self.0.get(&module)?.has(last);
        if is_module || !is_item {
            let (module, inside) = self.nearest(&[], path);
            return inside.is_empty().then(|| self.0.get(&module))?.map(|source| &*source.file);
        }
        inside.push(last.clone());
        let place = (module, inside);
        let (module, inside) = match self.behind(&place) {
            Some((module, path)) => self.target(&module, &path)?,
            None => place,
        };
        let here = self.0.get(&module).filter(|source| source.defined.contains(&inside[0]))?;
        let mut files = [here].into_iter().chain(self.0.values());
        let method = <[String; 2]>::try_from(inside).ok().map(Into::into);
        let block = method.and_then(|method| files.find(|file| file.implemented.contains(&method)));
        Some(&block.unwrap_or(here).file)
    }

    /// Where what a file does not define itself comes from: behind an import of this name, or of all names of a module.
    fn behind(&self, (module, path): &(Path, Path)) -> Option<(Path, Path)> {
        let (first, rest) = path.split_first()?;
        // A module inside of the file may import what the file defines.
        let source = self.0.get(module).filter(|source| !source.defined.contains(first))?;
        if let Some(import) = source.imports.get(first) {
            return Some((module.clone(), [&import[..], rest].concat()));
        }
        let mut others = source.globs.iter().map(|glob| self.nearest(module, glob).0);
        let other = others.find(|other| self.0.get(other).is_some_and(|other| other.has(first)))?;
        Some((other, path.clone()))
    }

    /// Follows a path through the modules, as far as these are files, and returns the last of them and the rest of the
    /// path.
    fn nearest(&self, module: &[String], path: &[String]) -> (Path, Path) {
        let from_root = path.first().is_some_and(|first| first == "crate");
        let (mut module, mut rest) =
            if from_root { (Path::new(), &path[1..]) } else { (module.to_vec(), path) };
        while let Some((next, after)) = rest.split_first() {
            let child = [&module[..], std::slice::from_ref(next)].concat();
            if !self.0.contains_key(&child) {
                break;
            }
            (module, rest) = (child, after);
        }
        (module, rest.to_vec())
    }
}

/// Reads the files of a module's folder.
fn collect(folder: &FilePath, module: &[String], files: &mut BTreeMap<Path, Source>) -> Result<()> {
    let unreadable = || format!("{} cannot be read", folder.display());
    for entry in fs::read_dir(folder).with_context(unreadable)? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if stem == "tests" || (path.is_dir() && stem == "guide") {
            continue;
        }
        let is_folder = stem == "mod" || stem == "lib";
        let inside = if is_folder { module.to_vec() } else { [module, &[stem]].concat() };
        if path.is_dir() {
            collect(&path, &inside, files)?;
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = fs::read_to_string(&path).with_context(unreadable)?;
            let source =
                Source::read(&inside, &text).with_context(|| path.display().to_string())?;
            files.insert(inside, Source { file: path, ..source });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Source {
        Source::read(&["a".to_owned(), "b".to_owned()], text).unwrap()
    }

    fn used(text: &str) -> Vec<String> {
        read(text).used.into_iter().map(|path| path.join("::")).collect()
    }

    #[test]
    fn paths_are_found_in_lists_of_imports_and_in_code() {
        let text = "use crate::{c::{self as d, E, f::*}, G};\nuse super::h::I as _;\nmod j { use super::k; }\n";
        let paths = ["crate::G", "crate::a::b::k", "crate::a::h::I", "crate::c", "crate::c::E"];
        assert_eq!(used(text), paths);
        let source = read(text);
        assert_eq!(source.imports["d"], ["crate", "c"]);
        assert_eq!(source.globs, [["crate", "c", "f"]]);
        assert_eq!(used("x(self::l::m::<N>(), d::o!())"), ["N", "crate::a::b::l::m", "d::o", "x"]);
    }

    #[test]
    fn comments_quotes_tests_and_documentation_name_nothing() {
        assert!(used("// a::b\n/* a::b */ \"a::b \\\" c\" r#\"a::\"b\"#").is_empty());
        assert_eq!(used("'x' '\\'' 'a ").len(), 1, "the name of a lifetime");
        assert!(used("#[cfg(test)]\nmod tests { use crate::c; fn f() { c() } }").is_empty());
        assert!(used("#[cfg(doc)]\nuse crate::{c, d};\n#[cfg(test)]\nuse crate::e;").is_empty());
        assert_eq!(used("#[derive(F)]\n#[cfg(feature = \"x\")]\nuse crate::g;"), ["crate::g"]);
    }

    #[test]
    fn what_is_only_handed_on_is_not_used() {
        assert!(used("pub(crate) use c::D;\npub use e::{F, G};").is_empty());
        let defined = read("pub const fn f() {}\nstruct S;").defined;
        assert!(["f", "S"].iter().all(|name| defined.contains(*name)), "{defined:?}");
    }
}
