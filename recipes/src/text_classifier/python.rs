//! The order in which Python's `random.shuffle` puts items, so that a run has the data of a program in Python.

/// Shuffles items as `random.seed(seed)` and `random.shuffle(items)` do.
pub fn shuffle<T>(items: &mut [T], seed: i64) {
    let mut random = Random::new(seed);
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last + 1));
    }
}

const SIZE: usize = 624;
const MIDDLE: usize = 397;

/// The generator of Python's module `random`: the Mersenne Twister MT19937 of Matsumoto and Nishimura (1998).
struct Random {
    state: [u32; SIZE],
    /// How many numbers were taken from the state.
    taken: usize,
}

impl Random {
    fn new(seed: i64) -> Self {
        // The seed as digits of 32 bits, of which there is at least one.
        let seed = seed.unsigned_abs();
        let digits = [seed as u32, (seed >> 32) as u32];
        let digits = if digits[1] == 0 { &digits[..1] } else { &digits[..] };

        let mut state = [19_650_218_u32; SIZE];
        for i in 1..SIZE {
            state[i] = mixed(state[i - 1], 1_812_433_253).wrapping_add(i as u32);
        }
        // Each place but the first, beginning with the second; the first one is then that of the last.
        let places = (1..SIZE).cycle();
        let mut before = state[0];
        for (i, digit) in places.clone().zip((0..digits.len()).cycle()).take(SIZE) {
            let mixed = state[i] ^ mixed(before, 1_664_525);
            state[i] = mixed.wrapping_add(digits[digit]).wrapping_add(digit as u32);
            before = state[i];
        }
        for i in places.skip(1).take(SIZE - 1) {
            state[i] = (state[i] ^ mixed(before, 1_566_083_941)).wrapping_sub(i as u32);
            before = state[i];
        }
        state[0] = 0x8000_0000;
        Self { state, taken: SIZE }
    }

    /// A number below `count`, all of which are equally likely.
    fn below(&mut self, count: usize) -> usize {
        let bits = usize::BITS - count.leading_zeros();
        loop {
            let number = (self.next() >> (32 - bits)) as usize;
            if number < count {
                return number;
            }
        }
    }

    fn next(&mut self) -> u32 {
        if self.taken == SIZE {
            self.twist();
        }
        let mut y = self.state[self.taken];
        self.taken += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn twist(&mut self) {
        for i in 0..SIZE {
            let next = self.state[(i + 1) % SIZE];
            let y = (self.state[i] & 0x8000_0000) | (next & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + MIDDLE) % SIZE] ^ (y >> 1) ^ odd;
        }
        self.taken = 0;
    }
}

/// A step of Knuth's multiplicative generator, with which the state begins.
fn mixed(before: u32, factor: u32) -> u32 {
    (before ^ (before >> 30)).wrapping_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ten_thousandth_number_is_that_of_the_standard() {
        // C++ defines it for `std::mt19937`, whose seed 5489 is not spread over digits.
        let mut random = Random::new(0);
        random.state = [5489; SIZE];
        for i in 1..SIZE {
            random.state[i] = mixed(random.state[i - 1], 1_812_433_253).wrapping_add(i as u32);
        }
        let last = (0..10_000).map(|_| random.next()).last();
        assert_eq!(last, Some(4_123_659_995));
    }
}
