//! Random orders and numbers that depend on a seed alone, and not on libtorch's random numbers: they are the same on
//! every rank, and a resumed run has them without having saved them.

/// Puts the items in the order of an epoch, by a number that each of them has.
pub fn shuffle<T>(items: &mut [T], seed: i64, epoch: u64, number: impl Fn(&T) -> u64) {
    let key = mixed((seed as u64) ^ mixed(epoch));
    items.sort_by_cached_key(|item| mixed(key ^ number(item)));
}

/// Returns the numbers below `count` in the order of an epoch.
pub fn order(count: usize, seed: i64, epoch: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    shuffle(&mut order, seed, epoch, |&place| place as u64);
    order
}

/// SplitMix64, which gives different numbers for different ones.
pub fn mixed(number: u64) -> u64 {
    let z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_every_number_once_and_depends_on_the_seed_and_the_epoch() {
        let orders = [order(50, 0, 0), order(50, 0, 1), order(50, 1, 0)];
        for (place, one) in orders.iter().enumerate() {
            let mut sorted = one.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..50).collect::<Vec<_>>());
            assert!(orders[place + 1..].iter().all(|other| other != one));
        }
        assert_eq!(order(50, 0, 1), orders[1]);
    }

    #[test]
    fn mixed_numbers_are_those_of_splitmix64() {
        // The first two outputs for the seed 0, in Vigna's implementation.
        assert_eq!(mixed(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mixed(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }
}
