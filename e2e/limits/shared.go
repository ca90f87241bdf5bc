package main

import (
	"fmt"
	"strings"
)

// shared is a line of the page's second table: something that there is one of, for all
// pods of a node, of a loop or of the process.
type shared struct {
	what   string
	bounds []string // package and name of lines of bounds
	share  string   // a pod's part of it
	test   string   // package and name of the test of one greedy pod and an innocent one; "": there is none
}

// What belongs to one pod alone (its listeners, sessions, connections to its
// application) is not shared, and has no line.
var sharedOf = []shared{
	{"a loop's time", []string{"dataplane/engine podBytes", "dataplane/engine podWork", "dataplane/engine podSent", "dataplane/engine leastBytes", "dataplane/engine leastWork", "dataplane/engine leastSent"},
		"so much an iteration, less where several pods have work put off. It counts turns and bytes, not time: what one turn costs has bounds of its own", "dataplane/engine TestFloodsOfAPod"},
	{"a loop's accepts", []string{"dataplane/engine podAccepts", "dataplane/engine fewAccepts"}, "so many a listener and iteration", "dataplane/engine TestFloodsOfAPod"},
	{"a loop's mailbox and timers", []string{"dataplane/reactor maxMail", "dataplane/reactor maxTimers", "dataplane/reactor maxRounds"},
		"none: what is left runs in the next iteration, in order. What fills them is bounded by the pod's connections", ""},
	{"memory", []string{"dataplane/engine podHeld", "dataplane/engine fairHeld", "dataplane/engine hopHeld"}, "so much a pod and loop, or a quarter of the limit", "dataplane/engine TestPodHoldsTooMuch"},
	{"descriptors", []string{"dataplane/engine filesShare", "dataplane/engine leastFiles", "dataplane/engine filesReserve"}, "`filesShare` times what is free, where it is not alone; `leastFiles` always", "dataplane/engine TestPodsPartOfFiles"},
	{"hop sessions being made", []string{"dataplane/engine podDials"}, "so many a loop; there is no bound for all", "dataplane/engine TestDialsAtOnce"},
	{"handshakes", []string{"meshhop DefaultNode", "meshhop DefaultPod", "meshhop podOwn"}, "`podOwn` always, `DefaultPod` at most; the pod with the fewest comes next (decision 052)", "meshhop TestTurnsAreFair"},
	{"renewal handshakes", []string{"meshhop podRenewals"}, "it is a bound of each pod, and each takes a turn of its own pod's among the handshakes", "meshhop TestRenewalsOfAPod"},
	{"handshakes that wait", []string{"meshhop DefaultQueue", "meshhop podQueue"}, "a `podQueue`th part; a full queue gives up the last of whoever has most in it", "meshhop TestTurnsAreFair"},
	{"connections whose ClientHello is not there", []string{"dataplane/inbound podHellos", "dataplane/inbound peerHellos"}, "`podHellos` a pod and loop, of them `peerHellos` of one address; the oldest gives way", "dataplane TestSilentCallers"},
	{"kept bodies", []string{"dataplane/exchange keptMax"}, "a quarter at most, half while it is alone (package `share`); so of the half that is to be sent again", "dataplane/exchange TestAPodHasItsShareOfWhatIsKept"},
	{"mirrors", []string{"dataplane/outbound maxMirrors"}, "a quarter at most, half while it is alone", "dataplane/outbound TestAPodHasItsShareOfMirrors"},
	{"waits for rows", []string{"dataplane/outbound maxCold"}, "a quarter at most, half while it is alone", "dataplane/outbound TestColdBounds"},
	{"questions to the authorization service", []string{"dataplane/extauthz maxAsked"}, "a quarter at most, half while it is alone", "dataplane/extauthz TestBounds"},
	{"the scheduler's processors, for relays", []string{"dataplane/relay spareProcs"}, "none: directions have turns in the order in which they ask, however many are one pod's. Loops have `spareProcs`", ""},
	{"large buffers of relays", []string{"dataplane/relay most64k", "dataplane/relay most256k", "dataplane/relay most512k", "dataplane/engine roomyPart"},
		"while a pod's relays hold a quarter of `podHeld` (`roomyPart`) they get no more; who finds none works with a smaller one, and each direction has 16 KiB", "dataplane/relay TestWhatARelayHoldsIsCounted"},
	{"the last decisions (`why`)", []string{"dataplane/journal staleAfter"}, "of 512, and of 512 refusals and failures, what is left when the others have as much, for each direction of its traffic", "dataplane/journal TestAPodsEntriesStay"},
	{"the failure log", []string{"dataplane/telemetry failureRate", "dataplane/telemetry failureQueue", "dataplane/telemetry failureShare"}, "`failureRate` of each cause, and `failureShare` of the queue", "dataplane/telemetry TestAPodHasItsShareOfTheFailureLog"},
	{"causes of rationed lines", []string{"dataplane/telemetry maxCauses"}, "none: a cause is made of closed sets and the node's pods, so that no pod makes them without end", ""},
	{"series of metrics", []string{"dataplane/telemetry maxSeries"}, "none: nothing in a label is a request's to choose, but a pod that calls a thousand services has a thousand", ""},
	{"the admin's answers", []string{"dataplane/admin/guard maxSeconds", "dataplane/admin maxShown"}, "no pod reaches it", ""},
}

const sharedHead = `
## What pods share

What there is one of, for all pods of a loop, of a node or of the process; what a pod may have of it; and the test of
one pod that takes all it can beside one that asks for little. Free lists are left out: whoever finds one empty
allocates. What belongs to one pod alone is not here.

| what | bounds | a pod's part | test |
|---|---|---|---|
`

// renderShared makes the table.
func renderShared() string {
	var b strings.Builder
	b.WriteString(sharedHead)
	for _, s := range sharedOf {
		names := make([]string, len(s.bounds))
		for i, n := range s.bounds {
			_, name, _ := strings.Cut(n, " ")
			names[i] = "`" + name + "`"
		}
		test := "none"
		if p, name, ok := strings.Cut(s.test, " "); ok {
			test = "`" + p + "`: " + name
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", s.what, strings.Join(names, ", "), s.share, test)
	}
	return b.String()
}
