package engine

import (
	"runtime/metrics"
)

// Level says how short of memory the process is; each level includes those below it.
type Level uint8

// The levels, in the order in which things are given up (contract 17). What asks whether
// the node lives is exempt from all of them.
const (
	Calm          Level = iota
	Shrink              // free buffers are not kept
	NoKeepAlive         // connections end with the answer under way
	StopRequests        // requests are answered 503
	StopAccepting       // new connections wait in their backlog
)

var levelNames = [...]string{"calm", "shrink", "no-keep-alive", "stop-requests", "stop-accepting"}

func (v Level) String() string { return levelNames[v] }

// Where the levels begin, in hundredths of the limit of memory.
const (
	shrinkAt  = 80
	closeAt   = 90
	refuseAt  = 95
	acceptAt  = 98
	scaleFrom = 85 // from here to scaleTo limits of time shrink
	scaleTo   = 95 // to a tenth
	easeBy    = 3  // so far below its beginning a level ends
	leastTime = 10 // hundredths of a limit of time that are left at scaleTo
)

var levelAt = [...]int{Shrink: shrinkAt, NoKeepAlive: closeAt, StopRequests: refuseAt, StopAccepting: acceptAt}

// overload judges the use of memory. It is pure: the zero value is calm.
type overload struct {
	level Level
	scale int // hundredths of a limit of time that are in force; 0: all
}

// sample takes a reading and reports whether anything changed. limit 0: there is none.
func (o *overload) sample(used, limit uint64) bool {
	was := *o
	pct := 0
	if limit > 0 {
		pct = int(min(float64(used)/float64(limit)*100, 1000))
	}
	for o.level < StopAccepting && pct >= levelAt[o.level+1] {
		o.level++
	}
	for o.level > Calm && pct < levelAt[o.level]-easeBy {
		o.level--
	}
	o.scale = 100
	if pct > scaleFrom {
		o.scale = max(leastTime, 100-(pct-scaleFrom)*(100-leastTime)/(scaleTo-scaleFrom))
	}
	return o.level != was.level || o.scale != max(was.scale, leastTime)
}

// memoryUsed is what the live heap had at the last collection, and the stacks: what a collection
// would free says nothing about load.
func memoryUsed() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/stacks:bytes"}, {Name: "/memory/classes/os-stacks:bytes"}}
	metrics.Read(s)
	var n uint64
	for i := range s {
		if s[i].Value.Kind() == metrics.KindUint64 {
			n += s[i].Value.Uint64()
		}
	}
	return n
}

// Shed is a kind of thing that was refused or ended for want of memory or descriptors.
type Shed uint8

// The kinds.
const (
	ShedRequest    Shed = iota // answered 503
	ShedKeepAlive              // a connection ended with its answer
	ShedAccept                 // a listener was left alone for a while: the process is short of memory
	ShedFiles                  // the same: the process is short of descriptors
	ShedPodFiles               // the same: the pod has its part of the descriptors
	ShedPodMemory              // a pod came to hold too much: it is read from less
	ShedDescriptor             // a connection reset because its descriptor lies in the reserve
	shedKinds
)

var shedNames = [shedKinds]string{"request", "keep-alive", "accept-memory", "accept-descriptors", "accept-pod-descriptors", "pod-memory", "descriptor-reserve"}

func (k Shed) String() string { return shedNames[k] }

// ShedKinds names the kinds in order, for labels.
func ShedKinds() []string { return shedNames[:] }
