//! The order of the images, and their augmentation.

use super::batch::{Pictures, View};
use crate::order::{mixed, order};

/// The order in which images are read, and how each of them is augmented. Both depend on the seed and on how many
/// images were read, so a resumed run and each of several ranks has the same views.
#[derive(Clone, Debug)]
pub struct Reader {
    count: usize,
    /// How far an image is moved at most in each direction.
    most: i64,
    mirrors: bool,
    seed: i64,
    /// The last epoch that was read from, and its order.
    epoch: (u64, Vec<usize>),
    /// How many images were read so far. A checkpoint has this number, from which a resumed run goes on.
    pub position: u64,
}

impl Reader {
    /// Reads from the beginning.
    pub fn new(pictures: &Pictures, mirrors: bool, seed: i64) -> Self {
        let (count, most) = (pictures.len(), pictures.border());
        Self { count, most, mirrors, seed, epoch: (0, order(count, seed, 0)), position: 0 }
    }

    /// The next views, of each image once in an epoch.
    pub fn next(&mut self, count: usize) -> Vec<View> {
        let size = self.count as u64;
        let numbers = self.position..self.position + count as u64;
        self.position = numbers.end;
        let view = |number| {
            let epoch = number / size;
            if self.epoch.0 != epoch {
                self.epoch = (epoch, order(self.count, self.seed, epoch));
            }
            self.view(self.epoch.1[(number % size) as usize], number)
        };
        numbers.map(view).collect()
    }

    fn view(&self, image: usize, number: u64) -> View {
        let random = mixed(mixed(!self.seed as u64) ^ number);
        let below = 2 * self.most as u64 + 1;
        let moved = [random & 0xff_ffff, (random >> 24) & 0xff_ffff];
        let moved = moved.map(|random| (random % below) as i64 - self.most);
        View { image, moved, is_mirrored: self.mirrors && random >> 63 == 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn reader() -> Reader {
        let epoch = (0, order(100, 3, 0));
        Reader { count: 100, most: 2, mirrors: true, seed: 3, epoch, position: 0 }
    }

    #[test]
    fn an_epoch_has_every_image_once_in_views_of_all_kinds_and_a_position_goes_on() {
        let mut reader = reader();
        let whole = reader.clone();
        let views = [reader.next(100), reader.next(100)];
        let images = |views: &[View]| views.iter().map(|view| view.image).collect::<Vec<_>>();
        assert_ne!(images(&views[0]), images(&views[1]));
        for views in &views {
            assert_eq!(images(views).into_iter().collect::<BTreeSet<_>>().len(), 100);
            let kinds: BTreeSet<_> = views.iter().flat_map(|view| view.moved).collect();
            assert_eq!(kinds, (-2..=2).collect());
            let mirrored = views.iter().filter(|view| view.is_mirrored).count();
            assert!((30..70).contains(&mirrored), "{mirrored}");
        }
        let mut resumed = Reader { position: 90, ..whole.clone() };
        assert_eq!(resumed.next(20), [&views[0][90..], &views[1][..10]].concat());
        let mut plain = Reader { mirrors: false, most: 0, ..whole };
        assert!(plain.next(50).iter().all(|view| !view.is_mirrored && view.moved == [0; 2]));
    }
}
