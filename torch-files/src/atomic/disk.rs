//! The file system operations of a replacement, as a trait, so that tests can make each of them fail or lose its
//! effect.

use std::fs::{self, File, Permissions};
use std::io::{self, Seek, Write};
use std::path::Path;

/// A file system.
pub(crate) trait Disk {
    type File: DiskFile;
    type Folder;

    /// Opens an existing folder.
    fn open_folder(&self, folder: &Path) -> io::Result<Self::Folder>;
    /// Creates a file that does not exist yet.
    fn create_new(&self, path: &Path) -> io::Result<Self::File>;
    /// Renames a file over another one.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Syncs a folder, so that the names in it survive a power loss.
    fn sync_folder(&self, folder: &Self::Folder) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// After how many written bytes the data is synced in the background.
    fn sync_every(&self) -> u64;
}

/// An open file.
pub(crate) trait DiskFile: Write + Seek + Send + Sized + 'static {
    /// A second handle, for another thread.
    fn try_clone(&self) -> io::Result<Self>;
    /// Syncs the data, so that it survives a power loss.
    fn sync_data(&self) -> io::Result<()>;
    /// Syncs the data and the metadata that is needed to find it, so that both survive a power loss.
    fn sync_all(&self) -> io::Result<()>;
    /// Sets the permissions, unless they are the same already.
    fn set_permissions(&self, permissions: &Permissions) -> io::Result<()>;
}

/// The file system of the operating system.
pub(crate) struct Real {
    pub(crate) sync_every: u64,
}

impl Default for Real {
    fn default() -> Self {
        Self { sync_every: 64 << 20 }
    }
}

impl Disk for Real {
    type File = File;
    /// `None` on systems on which a folder cannot be synced.
    type Folder = Option<File>;

    fn open_folder(&self, folder: &Path) -> io::Result<Option<File>> {
        if !fs::metadata(folder)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        if cfg!(unix) { File::open(folder).map(Some) } else { Ok(None) }
    }

    fn create_new(&self, path: &Path) -> io::Result<File> {
        File::create_new(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_folder(&self, folder: &Option<File>) -> io::Result<()> {
        match folder.as_ref().map_or(Ok(()), File::sync_all) {
            // The answers of file systems that cannot sync a folder. A sync that failed returns EIO or the like.
            Err(error) if cannot_sync(error.kind()) => Ok(()),
            result => result,
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_every(&self) -> u64 {
        self.sync_every
    }
}

fn cannot_sync(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

impl DiskFile for File {
    fn try_clone(&self) -> io::Result<Self> {
        Self::try_clone(self)
    }

    fn sync_data(&self) -> io::Result<()> {
        Self::sync_data(self)
    }

    fn sync_all(&self) -> io::Result<()> {
        Self::sync_all(self)
    }

    fn set_permissions(&self, permissions: &Permissions) -> io::Result<()> {
        // File systems without permissions refuse to set them, but report the same ones for all files.
        if self.metadata()?.permissions() == *permissions {
            return Ok(());
        }
        Self::set_permissions(self, permissions.clone())
    }
}
