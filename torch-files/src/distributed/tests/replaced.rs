//! Tests of what a save does to what is in its place, and of what is left when it ends early.

use std::io::{self, Write};
use std::time::Duration;

use super::*;
use crate::distributed::{INDEX, is_whole, remove, remove_leftover};
use crate::error::Error;

pub(super) fn listed(folder: &Path) -> Vec<String> {
    let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = fs::read_dir(folder).unwrap().map(name).collect();
    names.sort();
    names
}

pub(super) fn content(folder: &Path) -> String {
    let file = TorchFile::open(folder).unwrap();
    file.verify().unwrap();
    dumped(&file)
}

#[test]
fn a_folder_is_replaced_by_its_index_and_old_files_go() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        save_small(kind, &folder.run(), 1).unwrap();
        assert_eq!(listed(&folder.run()), [kind.index(), &file_of(kind, 0, 0)]);
        let old = TorchFile::open(folder.run()).unwrap();
        let before = content(&folder.run());
        save_small(kind, &folder.run(), 2).unwrap();
        assert_eq!(listed(&folder.run()), [kind.index(), &file_of(kind, 0, 1)]);
        assert_ne!(content(&folder.run()), before);
        // A reader that was there before goes on with the old content.
        old.verify().unwrap();
        assert_eq!(dumped(&old), before);
        // Others' files stay, and those of another number of ranks go.
        fs::write(folder.run().join("vocab.json"), "{}").unwrap();
        fs::write(folder.run().join(file_of(kind, 3, 0)), "").unwrap();
        fs::write(folder.run().join(format!(".{}.1-2.tmp", file_of(kind, 0, 0))), "").unwrap();
        save_small(kind, &folder.run(), 1).unwrap();
        assert_eq!(listed(&folder.run()), [kind.index(), &file_of(kind, 0, 2), "vocab.json"]);
        assert_eq!(content(&folder.run()), before);
    }
}

/// A reader would go on with the index of the other kind.
#[test]
fn a_folder_of_the_other_kind_is_not_replaced() {
    let [one, other] = FolderKind::ALL;
    for (kind, other) in [(one, other), (other, one)] {
        let folder = Temporary::new();
        save_small(kind, &folder.run(), 1).unwrap();
        let before = (listed(&folder.run()), content(&folder.run()));
        let error = save_small(other, &folder.run(), 2).unwrap_err();
        assert!(error.to_string().contains(kind.index()), "{error}");
        assert_eq!((listed(&folder.run()), content(&folder.run())), before);
        // Nor is one whose save has not finished.
        fs::remove_file(folder.run().join(kind.index())).unwrap();
        let error = save_small(other, &folder.run(), 2).unwrap_err();
        assert!(error.to_string().contains(&file_of(kind, 0, 0)), "{error}");
    }
}

#[test]
fn what_is_no_checkpoint_is_not_replaced() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        fs::create_dir(folder.run()).unwrap();
        fs::write(folder.run().join("thesis.tex"), "").unwrap();
        let error = save_small(kind, &folder.run(), 1).unwrap_err();
        assert!(error.to_string().contains("such as `thesis.tex`"), "{error}");
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        assert!(save_small(kind, &file, 1).unwrap_err().to_string().contains("it is a file"));
        assert_eq!(fs::read(&file).unwrap(), b"x");
        // As for a file, the folder above must exist.
        let error = save_small(kind, &folder.path().join("a/b"), 1).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(!folder.path().join("a").exists());
    }
}

/// Fails when it is written.
struct Failing;

impl Storage for Failing {
    fn size_in_bytes(&self) -> u64 {
        2
    }

    fn write_to(&self, _: &mut dyn Write) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }
}

#[test]
fn a_save_that_fails_leaves_nothing_and_the_old_checkpoint() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        let value = dict(&[("x", TensorRef::contiguous("0", Dtype::Uint8, vec![2]).into())]);
        let failing = FolderWriter::new(&value, [Failing], &Limits::default()).unwrap();
        let error = failing.save(folder.run()).unwrap_err();
        assert!(
            matches!(&error, Error::Io { cause, .. } if cause.kind() == io::ErrorKind::StorageFull)
        );
        assert!(!folder.run().exists());
        save_small(kind, &folder.run(), 1).unwrap();
        let before = (listed(&folder.run()), content(&folder.run()));
        failing.save(folder.run()).unwrap_err();
        assert_eq!((listed(&folder.run()), content(&folder.run())), before);
    }
}

#[test]
fn a_folder_without_an_index_is_no_checkpoint_and_its_save_can_be_repeated() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        save_small(kind, &folder.run(), 1).unwrap();
        let right = content(&folder.run());
        fs::remove_file(folder.run().join(kind.index())).unwrap();
        assert!(!is_whole(&folder.run()));
        let error = TorchFile::open(folder.run()).unwrap_err();
        assert!(error.to_string().contains("its save has not finished"), "{error}");
        assert!(!remove_leftover(&folder.run(), Duration::from_secs(60)).unwrap());
        save_small(kind, &folder.run(), 1).unwrap();
        assert_eq!(content(&folder.run()), right);
        assert_eq!(listed(&folder.run()), [kind.index(), &file_of(kind, 0, 1)]);
        assert!(!remove_leftover(&folder.run(), Duration::ZERO).unwrap(), "it is whole");
        fs::remove_file(folder.run().join(kind.index())).unwrap();
        assert!(remove_leftover(&folder.run(), Duration::ZERO).unwrap());
        assert!(!folder.run().exists());
        // Others' files are nobody's leftovers.
        fs::create_dir(folder.run()).unwrap();
        fs::write(folder.run().join("x"), "").unwrap();
        assert!(!remove_leftover(&folder.run(), Duration::ZERO).unwrap());
        assert_eq!(listed(&folder.run()), ["x"]);
    }
}

#[test]
fn ranks_that_have_saved_alone_are_not_taken_for_a_killed_save() {
    let kind = FolderKind::Distcp;
    let folder = Temporary::new();
    save_small(kind, &folder.run(), 1).unwrap();
    fs::rename(folder.run().join(INDEX), folder.run().join("__0.metadata")).unwrap();
    let error = TorchFile::open(folder.run()).unwrap_err();
    assert!(error.to_string().contains("use_collectives=False"), "{error}");
    assert!(!remove_leftover(&folder.run(), Duration::ZERO).unwrap());
    assert_eq!(listed(&folder.run()), ["__0.metadata", "__0_0.distcp"]);
    // One rank with two files, over a checkpoint with one.
    let older = Temporary::new();
    save_small(kind, &older.run(), 1).unwrap();
    fs::copy(older.run().join(INDEX), folder.run().join(INDEX)).unwrap();
    fs::write(folder.run().join("__0_1.distcp"), "").unwrap();
    assert!(!remove_leftover(&folder.run(), Duration::ZERO).unwrap());
    assert!(folder.run().join("__0_1.distcp").exists());
}

#[test]
fn what_is_no_folder_is_no_leftover() {
    let folder = Temporary::new();
    let leftover = || remove_leftover(&folder.run(), Duration::ZERO).unwrap();
    assert!(!leftover(), "there is nothing");
    fs::write(folder.run(), "x").unwrap();
    assert!(!leftover());
    assert_eq!(fs::read(folder.run()).unwrap(), b"x");
    #[cfg(unix)]
    {
        fs::remove_file(folder.run()).unwrap();
        fs::create_dir(folder.path().join("other")).unwrap();
        std::os::unix::fs::symlink("other", folder.run()).unwrap();
        assert!(!leftover());
        assert_eq!(listed(folder.path()), ["other", "run"]);
    }
}

#[test]
fn what_a_killed_save_of_python_has_left_is_replaced() {
    let kind = FolderKind::Distcp;
    let folder = Temporary::new();
    fs::create_dir(folder.run()).unwrap();
    let left = || {
        for name in ["__0_0.distcp", ".metadata.tmp"] {
            fs::write(folder.run().join(name), "half").unwrap();
        }
    };
    left();
    save_small(kind, &folder.run(), 1).unwrap();
    assert_eq!(listed(&folder.run()), [INDEX, "__0_1.distcp"]);
    fs::remove_file(folder.run().join(INDEX)).unwrap();
    left();
    assert!(remove_leftover(&folder.run(), Duration::ZERO).unwrap());
    assert!(!folder.run().exists());
}

#[test]
fn no_file_is_overwritten_that_has_the_last_number() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        save_small(kind, &folder.run(), 1).unwrap();
        let last = folder.run().join(kind.name_of(0, u64::MAX));
        fs::write(&last, "x").unwrap();
        let error = save_small(kind, &folder.run(), 1).unwrap_err();
        assert!(error.to_string().contains("no number after"), "{error}");
        assert_eq!(fs::read(last).unwrap(), b"x");
    }
}

#[test]
fn what_killed_saves_have_left_in_a_whole_folder_goes_by_its_age() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        save_small(kind, &folder.run(), 1).unwrap();
        let right = content(&folder.run());
        let left = [
            &format!(".{}.1-2.tmp", file_of(kind, 0, 1)),
            &format!(".{}.1-3.tmp", kind.index()),
            &file_of(kind, 0, 1),
            &file_of(kind, 3, 0),
        ];
        // Only under their temporary names are they half.
        let whole = fs::read(folder.run().join(file_of(kind, 0, 0))).unwrap();
        for name in left {
            let half = &whole[..if name.ends_with(".tmp") { 9 } else { whole.len() }];
            fs::write(folder.run().join(name), half).unwrap();
        }
        fs::write(folder.run().join("vocab.json"), "{}").unwrap();
        let before = listed(&folder.run());
        assert!(!remove_leftover(&folder.run(), Duration::from_secs(60)).unwrap());
        assert_eq!(listed(&folder.run()), before);
        // Nothing is known of what a damaged index names.
        let index = fs::read(folder.run().join(kind.index())).unwrap();
        fs::write(folder.run().join(kind.index()), &index[1..]).unwrap();
        assert!(remove_leftover(&folder.run(), Duration::ZERO).unwrap(), "temporary files");
        let files = [
            kind.index(),
            &file_of(kind, 0, 0),
            &file_of(kind, 0, 1),
            &file_of(kind, 3, 0),
            "vocab.json",
        ];
        assert_eq!(listed(&folder.run()), files);
        fs::write(folder.run().join(kind.index()), &index).unwrap();
        assert!(remove_leftover(&folder.run(), Duration::ZERO).unwrap());
        assert_eq!(listed(&folder.run()), [kind.index(), &file_of(kind, 0, 0), "vocab.json"]);
        assert!(!remove_leftover(&folder.run(), Duration::ZERO).unwrap());
        assert_eq!(content(&folder.run()), right);
    }
}

#[test]
fn a_folder_is_removed_without_what_is_not_of_it() {
    for kind in FolderKind::ALL {
        let folder = Temporary::new();
        save_small(kind, &folder.run(), 1).unwrap();
        remove(&folder.run()).unwrap();
        assert!(!folder.run().exists());
        save_small(kind, &folder.run(), 1).unwrap();
        fs::write(folder.run().join("notes"), "").unwrap();
        remove(&folder.run()).unwrap();
        assert_eq!(listed(&folder.run()), ["notes"]);
    }
}
