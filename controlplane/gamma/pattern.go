package gamma

import (
	"fmt"
	"regexp/syntax"
)

// Bounds of a regular expression; the ones of controlplane/compile, which judges
// what other sources bring.
const (
	maxPattern = 1024 // bytes
	maxProgram = 4096 // instructions
)

// badPattern says why p is no pattern that a route may compare with; empty: it
// is one (RE2 syntax, as the Gateway API's implementations have it).
func badPattern(p string) string {
	if len(p) > maxPattern {
		return fmt.Sprintf("is %d bytes long, the limit is %d: shorten it", len(p), maxPattern)
	}
	re, err := syntax.Parse(p, syntax.Perl)
	if err != nil {
		return fmt.Sprintf("is no regular expression (%v): correct it; the syntax is RE2's", err)
	}
	// Repetitions multiply: what is far too large is not even compiled.
	size := programSize(re)
	if size <= 2*maxProgram {
		prog, err := syntax.Compile(re.Simplify())
		if err != nil {
			return fmt.Sprintf("cannot be compiled (%v): correct it", err)
		}
		size = len(prog.Inst)
	}
	if size > maxProgram {
		return fmt.Sprintf("compiles to more than %d instructions: make its repetitions smaller", maxProgram)
	}
	return ""
}

// programSize is about the number of instructions of re. The parser bounds
// the depth, and repetitions within repetitions.
func programSize(re *syntax.Regexp) int {
	n := 1
	for _, sub := range re.Sub {
		n += programSize(sub)
	}
	switch re.Op {
	case syntax.OpLiteral:
		n = len(re.Rune)
	case syntax.OpRepeat:
		if re.Max < 0 {
			n *= re.Min + 1
		} else {
			n *= max(re.Max, 1)
		}
	}
	return n
}
