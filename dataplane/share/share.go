// Package share says how pods divide what they have in common: places in a store, a
// queue or a set of things under way, of which there are only so many.
//
//   - A pod may have a third as much as is free, a quarter of all at most. So each that
//     takes all it can leaves three quarters of what it found, and however many they are
//     a pod that has nothing finds a place while there is one.
//   - One that is alone with what it has may have half.
//   - Nothing is set aside for pods that ask for nothing, and nothing is taken back.
//
// It knows nothing of what is divided, and keeps no count.
package share

// Room reports whether one that has own of all that are taken, of most that there may
// be, may take another.
func Room(own, all, most int) bool {
	return all < most && (3*own < most-all || own == all && own < most/2)
}
