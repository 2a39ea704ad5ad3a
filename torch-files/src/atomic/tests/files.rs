//! Replacing files on a real disk: links, permissions, names.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::{Folder, content, fill_with, replaced};
use crate::atomic::create_folder_on;
use crate::atomic::disk::{Disk, Real};
use crate::atomic::place::{Place, is_temporary};
use crate::atomic::{Replaced, create_folder, remove_leftovers, replace};
use crate::error::{Error, Result};

/// Replaces a file with a text.
pub(super) fn write(path: &Path, text: &str) -> Result<Replaced> {
    replace(path, &mut |target| target.write_all(text.as_bytes()))
}

/// Why a path is refused: the kind of error and the message.
pub(super) fn refused(path: &Path) -> (ErrorKind, String) {
    match write(path, "new") {
        Err(Error::Io { action: "replace", cause, .. }) => (cause.kind(), cause.to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_is_created_and_replaced() {
    let folder = Folder::new("replaced");
    let path = folder.join("model.bin");
    for (version, length) in [(1, 0), (2, 100_000), (3, 5)] {
        let new = content(version, length);
        replaced(replace(&path, &mut fill_with(&new, 3000)));
        assert_eq!(fs::read(&path).unwrap(), new);
        assert_eq!(folder.names(), ["model.bin"]);
    }
}

/// A real disk, and the folders that were synced on it.
#[derive(Default)]
struct Noted(Real, RefCell<Vec<PathBuf>>);

impl Disk for Noted {
    type File = File;
    type Folder = PathBuf;

    fn open_folder(&self, folder: &Path) -> io::Result<PathBuf> {
        self.0.open_folder(folder).map(|_| folder.to_owned())
    }

    fn sync_folder(&self, folder: &PathBuf) -> io::Result<()> {
        self.1.borrow_mut().push(folder.clone());
        self.0.sync_folder(&self.0.open_folder(folder)?)
    }

    fn create_new(&self, path: &Path) -> io::Result<File> {
        self.0.create_new(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.0.remove(path)
    }

    fn sync_every(&self) -> u64 {
        self.0.sync_every()
    }
}

/// The name of a folder is stored in its parent, which a power loss may reset to an older state.
#[test]
fn the_parents_of_created_folders_are_synced_and_no_others() {
    let folder = Folder::new("parents");
    let disk = Noted::default();
    create_folder_on(&disk, &folder.join("a/b/c")).unwrap();
    assert!(folder.join("a/b/c").is_dir());
    let mut synced = disk.1.take();
    synced.sort();
    assert_eq!(synced, [folder.0.clone(), folder.join("a"), folder.join("a/b")]);
    create_folder_on(&disk, &folder.join("a/b/c")).unwrap();
    assert_eq!(disk.1.take(), Vec::<PathBuf>::new());
    create_folder_on(&disk, &folder.join("a/d")).unwrap();
    assert_eq!(disk.1.take(), [folder.join("a")]);
}

#[test]
fn a_name_may_be_long_or_not_ascii() {
    let folder = Folder::new("names");
    for name in ["ä".repeat(127), "x".repeat(255), "-".to_owned(), "a b\nc".to_owned()] {
        replaced(write(&folder.join(&name), "new"));
        let temporary = Place::find(&folder.join(&name)).unwrap().temporary();
        let temporary = temporary.file_name().unwrap();
        assert!(is_temporary(temporary) && temporary.len() < 143, "{temporary:?}");
    }
    assert_eq!(folder.names().len(), 4);
}

#[test]
fn only_names_of_this_crate_are_temporary() {
    for name in [".model.bin.12-0.tmp", ".a.1-18446744073709551615.tmp", ".ä.b.1-2.tmp"] {
        assert!(is_temporary(OsStr::new(name)), "{name}");
    }
    let others = ["", ".tmp", "model.bin", "model.1-2.tmp", ".model.tmp", ".model.12.tmp"];
    let more =
        [".model.a-2.tmp", ".model.-.tmp", ".1-2.tmp", "..1-2.tmp", ".m.1-2.tmpx", ".m.+1-2.tmp"];
    for name in others.into_iter().chain(more) {
        assert!(!is_temporary(OsStr::new(name)), "{name}");
    }
}

#[test]
fn paths_that_are_not_files_are_refused() {
    let folder = Folder::new("refused");
    fs::create_dir(folder.join("folder")).unwrap();
    let no_name = |path: &str| assert_eq!(refused(Path::new(path)).0, ErrorKind::InvalidInput);
    for path in ["", "/", "..", "folder/.."] {
        no_name(path);
    }
    for name in ["folder", "folder/", "new/", ".model.bin.1-2.tmp"] {
        no_name(folder.join(name).to_str().unwrap());
    }
    #[cfg(unix)]
    no_name("/dev/null");
    fs::write(folder.join("read-only"), "old").unwrap();
    let mut permissions = fs::metadata(folder.join("read-only")).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(folder.join("read-only"), permissions).unwrap();
    assert_eq!(refused(&folder.join("read-only")).0, ErrorKind::PermissionDenied);
    assert_eq!(folder.names(), ["folder", "read-only"]);
}

#[test]
fn a_missing_folder_is_named() {
    let folder = Folder::new("missing");
    let error = write(&folder.join("no/model.bin"), "new").unwrap_err();
    let path = folder.join("no");
    let named = format!("cannot open the folder {}: ", path.display());
    assert!(error.to_string().starts_with(&named), "{error}");
    let Error::Io { cause, .. } = error else { panic!("{error}") };
    assert_eq!(cause.kind(), ErrorKind::NotFound);
}

#[test]
fn a_relative_path_refers_to_the_folder_at_the_start() {
    let place = Place::find(Path::new("model.bin")).unwrap();
    assert_eq!(place.folder, std::env::current_dir().unwrap());
    assert!(place.temporary().is_absolute());
}

#[test]
fn two_threads_leave_one_complete_file() {
    let folder = Folder::new("threads");
    let path = folder.join("model.bin");
    std::thread::scope(|scope| {
        for version in 0..4 {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..5 {
                    replaced(replace(path, &mut fill_with(&content(version, 50_000), 7000)));
                }
            });
        }
    });
    let found = fs::read(&path).unwrap();
    assert!((0..4).any(|version| found == content(version, 50_000)));
    assert_eq!(folder.names(), ["model.bin"]);
}

#[test]
fn old_leftovers_are_removed() {
    let folder = Folder::new("leftovers");
    let hour = Duration::from_secs(3600);
    let now = SystemTime::now();
    for (name, modified) in [
        (".model.bin.1-0.tmp", now - 2 * hour),
        (".model.bin.1-1.tmp", now),
        (".model.bin.1-2.tmp", now + hour),
        (".other.bin.1-0.tmp", now - 2 * hour),
        (".hidden.tmp", now - 2 * hour),
        ("model.bin", now - 2 * hour),
    ] {
        File::create(folder.join(name)).unwrap().set_modified(modified).unwrap();
    }
    fs::create_dir(folder.join(".folder.1-3.tmp")).unwrap();
    let ours = |name: &str| name == "model.bin";
    assert_eq!(remove_leftovers(&folder.0, hour, ours).unwrap(), 1);
    assert_eq!(remove_leftovers(&folder.0, Duration::ZERO, ours).unwrap(), 1);
    let left =
        [".folder.1-3.tmp", ".hidden.tmp", ".model.bin.1-2.tmp", ".other.bin.1-0.tmp", "model.bin"];
    assert_eq!(folder.names(), left);
    assert!(remove_leftovers(&folder.join("no"), hour, ours).is_err());
}

#[test]
fn folders_are_created() {
    let folder = Folder::new("created");
    let inner = folder.join("a").join("b");
    create_folder(&inner).unwrap();
    create_folder(&inner).unwrap();
    assert!(inner.is_dir());
    fs::write(folder.join("file"), "").unwrap();
    for taken in [folder.join("file"), folder.join("file").join("c")] {
        assert!(matches!(create_folder(&taken), Err(Error::Io { action: "create", .. })));
    }
}
