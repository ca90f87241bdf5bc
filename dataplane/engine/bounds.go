package engine

import "time"

// Bounds of the engine, one place (docs/limits.md is about these).
const (
	readBuf     = 16 << 10  // an HTTP/1 connection's read buffer while bytes move
	bigReadBuf  = 64 << 10  // when a head does not fit (contract 17: heads up to 60 KiB)
	outHigh     = 256 << 10 // queued output of an HTTP/1 connection before its source is stopped
	h2OutMax    = 512 << 10 // queued output of an HTTP/2 client before no more of its requests are read
	sealMax     = 256 << 10 // plaintext sealed at once
	keepBufs    = 256       // free small buffers a loop keeps of each kind
	smallOut    = 4 << 10   // a connection's output buffer to begin with
	bigOut      = 320 << 10 // and when bulk moves: what may be queued, its framing, and its records
	keepPend    = 64 << 10  // a free stream's buffer bigger than this is not kept
	keepSlack   = 64 << 10  // empty buffers of an HTTP/2 connection beyond this go trimAfter its last byte
	fieldSize   = 48        // bytes of a field beside its text
	keepBig     = 16        // free big buffers a loop keeps
	keepStreams = 4096      // free streams a loop keeps

	h2Window = 16 << 20 // receive window of an HTTP/2 connection; what a stream keeps for a slow reader takes nothing of it

	lifeMargin       = 2 * time.Minute         // a hop session takes no new requests this long before its certificates end
	goawayTime       = int64(30 * time.Second) // a client of HTTP/2 is told so long before its session's certificates end, or at half of their rest
	leaveTime        = int64(5 * time.Second)  // for the requests that are under way at an endpoint that has left
	maxWaiters       = 1024                    // requests that wait for one hop, or one HTTP/2 application
	maxSessions      = 4                       // hop sessions a key (contract 5.2)
	maxDrains        = 64                      // answers a session throws away while they come
	localHigh        = 64 << 10                // bytes of a request's body on the way in process before its source is stopped
	keepLocalStreams = 1024                    // free streams in process that a loop keeps
	maxAppH2         = 32                      // connections to one port of an HTTP/2 application
	maxIdleApp       = 256                     // idle connections to one port of one application
	lingerBytes      = 64 << 20
	lingerTime       = int64(2 * time.Second)
	headTime         = int64(15 * time.Second) // first byte of a head to its last
	idleDown         = int64(5 * time.Minute)  // downstream connection without a request
	idleStream       = int64(5 * time.Minute)  // exchange without a byte either way
	streamGrace      = int64(5 * time.Second)  // that a client's HTTP/2 stream has longer, for an answer that says so
	tickAfter        = int64(time.Second)      // between two Ticks of an HTTP/2 connection that is read from
	trimAfter        = int64(2 * time.Second)  // an HTTP/2 connection without a stream gives its memory back
	idleHop          = int64(30 * time.Second) // hop session without a stream
	warnAfter        = int64(time.Second)      // an HTTP/2 client that comes while the process drains is served before it is told
	settleTime       = int64(time.Second)      // from the client's answer to that to the last request that is taken: what it had begun to send arrives
	stallTime        = int64(5 * time.Second)  // what waits in a stream of a hop that holds too much, before the stream ends
	stallLook        = int64(time.Second)      // between two looks for such streams
	leastPause       = int64(10 * time.Millisecond)
	mostPause        = int64(time.Second)            // before a hop is dialled again whose sessions carry nothing, doubled each time
	pingAfter        = int64(5 * time.Second)        // silence of a peer that owes an answer before it is asked whether it lives
	pingWait         = int64(5 * time.Second)        // for its answer
	idleApp          = int64(5 * time.Minute)        // idle connection to the application
	halfTime         = int64(100 * time.Millisecond) // an HTTP/1 client's end that comes this soon behind its request is part of it
	hastyTime        = int64(100 * time.Millisecond) // an end this soon behind an answer was on its way with it
	lookAfter        = int64(10 * time.Millisecond)  // a connection to the application that was idle so long is looked at before it is used
	connectTime      = int64(5 * time.Second)        // delivery connect (contract 6.5)
)

// What a pod may do in one iteration of a loop. Pods that have work put off divide it
// among them, down to the least of each, so that an iteration does not grow with
// the number of busy pods.
const (
	podBytes   = 512 << 10 // bytes read
	podWork    = 128       // reads, accepts and heads handled; half of the events of a wait, so that others are looked for
	podSent    = 4 << 20   // bytes written or sealed
	podAccepts = 64        // connections accepted, a listener
	leastBytes = 64 << 10
	leastWork  = 32
	leastSent  = 512 << 10
)

// What a pod may hold on one loop.
const (
	podHeld     = 64 << 20 // bytes of buffers and parked requests, or a quarter of the process's limit of memory if that is less
	hopHeld     = 2        // times podHeld: a session of a hop is read from until then
	fairHeld    = 1 << 20  // above podHeld an HTTP/2 connection that holds so much is not read from
	tightOut    = 16 << 10 // and an HTTP/1 connection queues so much output
	roomyPart   = 4        // while what goroutines hold for the pod is less than this part of podHeld relays take large buffers
	requestHeld = 2 << 10  // bytes that the objects of one request take: exchange, streams, what services keep of it
	streamHeld  = 256      // and those of its upstream stream
	podDials    = 64       // hop sessions being made
	podSocks    = 64       // connections to the pod's Unix socket being made
)
