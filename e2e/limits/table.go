package main

// bound is a line of the page. Lines of a package stand together.
type bound struct {
	pkg  string // below the module
	name string // of a constant, or Type.Field of a default
	// unit says of what and for what. Its first word "bytes" or "time" says how the
	// value is shown.
	unit   string
	effect string
}

var bounds = []bound{
	{"sniff", "MaxPeek", "bytes", "the connection is taken for what its bytes have shown so far: TLS without the rest of its names, or opaque"},
	{"sniff", "maxName", "bytes of an SNI", "the SNI is taken for none: no DNS name is longer"},

	{"dataplane/engine", "readBuf", "bytes a connection", "no more is read until some of it has been used"},
	{"dataplane/engine", "bigReadBuf", "bytes a connection", "the buffer while a head does not fit `readBuf`; the codec refuses larger heads before it is full"},
	{"dataplane/engine", "outHigh", "bytes a connection", "an HTTP/1 connection's unsent output: its source is not read until half is gone"},
	{"dataplane/engine", "h2OutMax", "bytes a connection", "an HTTP/2 client's unsent output: nothing is read from it until it has read"},
	{"dataplane/engine", "sealMax", "bytes", "more plaintext is sealed in several goes"},
	{"dataplane/engine", "smallOut", "bytes a connection", "output that outgrows it moves to a buffer of `bigOut`"},
	{"dataplane/engine", "bigOut", "bytes a connection", "output that outgrows it, which `outHigh` and the codecs' bounds make rare, gets a buffer of its own"},
	{"dataplane/engine", "keepBufs", "free buffers a loop and kind, an eighth of it of `bigReadBuf`", "a buffer given back is left to the garbage collector"},
	{"dataplane/engine", "keepBig", "free buffers of `bigOut` a loop", "a buffer given back is left to the garbage collector"},
	{"dataplane/engine", "keepPend", "bytes", "the buffer of a stream that has ended is left to the garbage collector when it is larger"},
	{"dataplane/engine", "h2Window", "bytes an HTTP/2 connection", "flow control: the peer has to stop, on all its streams, until data has gone on"},
	{"dataplane/engine", "podBytes", "bytes a pod and iteration", "the pod's connections go on in the next iteration, after those of other pods"},
	{"dataplane/engine", "podAccepts", "connections a pod and iteration", "the rest is accepted in the next iteration"},
	{"dataplane/engine", "lifeMargin", "time", "a hop session takes no new requests this long before its certificates end, or at half of their rest if that is later"},
	{"dataplane/engine", "maxWaiters", "requests a key", "a further request that has to wait for a hop session is refused as an overflow"},
	{"dataplane/engine", "maxSessions", "sessions a key", "no further session is dialled: requests wait for room in these"},
	{"dataplane/engine", "maxIdleApp", "connections a port of an application", "a further connection is closed once idle"},
	{"dataplane/engine", "lingerBytes", "bytes", "an HTTP/1 connection closed before its request had ended: after this much more input it is cut"},
	{"dataplane/engine", "lingerTime", "time", "the same, after this long"},
	{"dataplane/engine", "headTime", "time", "an HTTP/1 request head that is not whole this long after its first byte is answered 408"},
	{"dataplane/engine", "idleDown", "time", "a client's connection without a request is closed (HTTP/2: with GOAWAY)"},
	{"dataplane/engine", "idleStream", "time", "a connection with requests on which no byte has moved is ended, and its requests with it, as a timeout"},
	{"dataplane/engine", "idleHop", "time", "a connection of ours without a stream, hop session or h2c application, is closed with GOAWAY"},
	{"dataplane/engine", "pingAfter", "time", "a hop session that owes an answer and is silent this long is asked by PING whether it lives"},
	{"dataplane/engine", "pingWait", "time", "and is closed when nothing follows for so long; the next request gets another session"},
	{"dataplane/engine", "idleApp", "time", "an idle HTTP/1 connection to an application is closed"},
	{"dataplane/engine", "connectTime", "time", "a connect to the application counts as failed"},

	{"dataplane/http1", "defaultMaxHead", "bytes of a head", "431; of a response: 502, and the connection to the application ends"},
	{"dataplane/http1", "defaultMaxFields", "field lines of a head", "431; of a response: 502, and the connection to the application ends"},
	{"dataplane/http1", "defaultMaxTarget", "bytes of a request target", "414"},
	{"dataplane/http1", "maxMethod", "bytes of a method", "501"},
	{"dataplane/http1", "maxOptions", "names in Connection fields of a head", "400; of a response: 502, and the connection to the application ends"},
	{"dataplane/http1", "maxExtensions", "bytes of chunk extensions, a body", "the body is malformed: the connection ends"},
	{"dataplane/http1", "maxTrailerBytes", "bytes of trailers", "the body is malformed: the connection ends"},
	{"dataplane/http1", "maxTrailers", "trailer lines", "the body is malformed: the connection ends"},
	{"dataplane/http1", "maxChunkDigits", "digits of a chunk's size", "the body is malformed: the connection ends"},
	{"dataplane/http1", "keepArena", "bytes", "a trailer buffer that grew larger is left to the garbage collector"},

	{"dataplane/http2", "Config.MaxStreams", "streams a connection", "a server refuses a further stream (REFUSED_STREAM); a client opens none: another session is used"},
	{"dataplane/http2", "Config.StreamWindow", "bytes a stream", "flow control: the peer has to stop until the data has gone on"},
	{"dataplane/http2", "Config.ConnWindow", "bytes a connection", "the same, for all its streams together; the engine asks for `h2Window`"},
	{"dataplane/http2", "Config.MaxHeader", "bytes of a decoded head, 32 more a field", "a request is answered 431; of a response, or trailers, the stream is reset"},
	{"dataplane/http2", "Config.MaxFields", "fields of a head", "a request is answered 431; of a response, or trailers, the stream is reset"},
	{"dataplane/http2", "maxFrame", "bytes of a frame", "connection error FRAME_SIZE_ERROR (RFC 9113 4.2)"},
	{"dataplane/http2", "maxQueued", "bytes a connection", "unsent output: no DATA is taken until half is gone"},
	{"dataplane/http2", "maxAcks", "frames a connection", "answers that the peer does not read: connection error ENHANCE_YOUR_CALM"},
	{"dataplane/http2", "maxContinuations", "CONTINUATION frames a head", "connection error ENHANCE_YOUR_CALM"},
	{"dataplane/http2", "maxEmpty", "empty DATA frames, less ten a useful frame", "connection error ENHANCE_YOUR_CALM"},
	{"dataplane/http2", "maxProvoked", "streams reset for the peer's faults, less those that ended well", "connection error ENHANCE_YOUR_CALM; for streams that the peer resets before their answer, this or `Config.MaxStreams` if larger"},
	{"dataplane/http2", "maxInterim", "1xx heads of a response", "the stream is reset, ENHANCE_YOUR_CALM"},
	{"dataplane/http2", "maxEnded", "streams", "ended and not collected by the driver: the garbage collector takes further ones"},
	{"dataplane/http2", "maxSettings", "SETTINGS frames, less one a stream that ended well", "connection error ENHANCE_YOUR_CALM"},
	{"dataplane/http2", "peerStreams", "streams a connection", "taken for the peer's limit until its SETTINGS come: no more are opened"},

	{"dataplane/hpack", "MaxTable", "bytes of the dynamic table, each way", "older entries are evicted; a peer that sets it larger: connection error COMPRESSION_ERROR"},
	{"dataplane/hpack", "defaultLimit", "bytes of decoded fields", "the head counts as too large"},
	{"dataplane/hpack", "maxIndexed", "bytes of a field", "a larger field is sent without a place in the table"},
	{"dataplane/hpack", "maxInt", "value of an integer", "connection error COMPRESSION_ERROR"},

	{"dataplane/outbound", "idleLimit", "time", "a captured connection that says nothing, to a port that must be HTTP, is closed"},
	{"dataplane/outbound", "dialLimit", "time", "the connect of a passed-through connection counts as failed: the client is reset"},
	{"dataplane/outbound", "keepSniffers", "sniffers a loop", "one given back is left to the garbage collector"},

	{"dataplane/inbound", "connectLimit", "time", "the connect to an application's raw-TCP port counts as failed: the caller is reset"},
	{"dataplane/inbound", "firstLimit", "time", "a verified hop that sends nothing is closed"},

	{"dataplane/relay", "pipeLen", "bytes of a pipe", "one splice moves at most this much"},
	{"dataplane/relay", "Options.KeepAlive", "time", "a silent connection is probed; four lost probes, a quarter of this apart, end it"},
	{"dataplane/relay", "Options.Patrol", "time", "both connections of a relay are looked at this often for a reset that no read or write meets"},
	{"dataplane/relay", "alertTime", "time", "the alert that tells of a broken hop is given up, and the connection is closed"},

	{"meshhop", "DefaultConnect", "time", "the connect of a hop counts as failed"},
	{"meshhop", "DefaultHandshake", "time, the wait for a turn included", "the handshake counts as failed"},
	{"meshhop", "DefaultNode", "handshakes at once, of all pods", "further ones wait for a turn"},
	{"meshhop", "DefaultPod", "handshakes at once, of one pod", "further ones wait for a turn"},
	{"meshhop", "DefaultQueue", "handshakes that wait", "a further one fails at once (`handshake-limit`)"},
	{"meshhop", "lingerTime", "time", "a refused caller that does not close is closed"},
	{"meshhop", "lingerBytes", "bytes", "a refused caller that goes on sending is closed"},

	{"mtls/record", "MaxPlain", "bytes of a record's plaintext", "more is sealed in several records; a longer one of the peer's: alert record_overflow (RFC 8446 5.1)"},
	{"mtls/record", "MaxRecord", "bytes of a record on the wire", "a longer one of the peer's: alert record_overflow"},
	{"mtls/record", "maxUseless", "records in a row without data", "alert unexpected_message: the connection ends"},
	{"mtls/record", "maxMessage", "bytes of a handshake message after the handshake", "the connection ends with an alert"},
	{"mtls/record", "rekeyAfter", "records a key", "the key is changed by KeyUpdate (RFC 8446 5.5)"},
	{"mtls/record", "maxPending", "bytes", "what crypto/tls wants sent and nobody collects: the connection ends"},

	{"controlplane/file", "maxFileSize", "bytes of a file", "the file is not read; reported"},
	{"controlplane/file", "maxTotal", "bytes of all files", "the file that exceeds it is not read; reported"},
	{"controlplane/file", "maxFiles", "files", "a further file is not read; reported"},
	{"controlplane/file", "maxDirDepth", "directories, nested", "a deeper one is not read; reported"},
	{"controlplane/file", "maxProblems", "problems reported at once", "the last one says how many are left out"},
	{"controlplane/file", "maxNesting", "levels of a document", "the object is not in force; reported"},
	{"controlplane/file", "maxAliased", "values reached by YAML aliases, a document", "the object is not in force; reported"},
	{"controlplane/file", "maxFlaws", "problems of a document", "further ones are not said"},
	{"controlplane/file", "maxRetries", "bytes of a file that are parsed again", "the line of an error in a file that is no YAML is the parser's guess"},
	{"controlplane/file", "maxWeight", "of a backendRef", "the backend is invalid: its share of the requests gets 500; reported"},
	{"controlplane/file", "quiet", "time", "without a change this long, the directory is read"},
	{"controlplane/file", "holdMax", "time", "the directory is read this long after the first change, however many follow"},
	{"controlplane/file", "rescan", "time", "the directory is read anyway, for changes that no event tells"},

	{"tproxy/rules", "MaxExclusions", "ports, and ranges, of a pod", "further ones are left out; reported"},
	{"tproxy/rules", "maxProblems", "problems of an annotation", "further ones are counted only"},
	{"tproxy/rules", "maxEntry", "bytes of an entry in a problem", "the rest is cut off"},
	{"tproxy/apply", "maxBuffer", "bytes, each way", "a transaction of more rules fails and the earlier rules stay; `MaxExclusions` keeps it far below"},
	{"tproxy/socket", "defaultReady", "sockets a pod and family", "no more are made ahead; when none is left the dial waits for the next"},
	{"tproxy/socket", "defaultBacklog", "connections a listener", "further ones wait for their SYN to be sent again; the kernel caps it at net.core.somaxconn"},
	{"tproxy/socket", "defaultIdle", "time", "a silent connection is probed"},
	{"tproxy/socket", "defaultInterval", "time", "between two probes"},
	{"tproxy/socket", "defaultCount", "probes", "after so many lost ones the connection is ended"},
}

// notBounds are constants whose names look like a bound's, and why they are none.
var notBounds = map[string]string{
	"dataplane/http2.initWindow":           "the protocol's (RFC 9113 6.9.2)",
	"dataplane/http2.settingInitialWindow": "an identifier (RFC 9113 6.5.2)",
	"dataplane/http2.maxWindow":            "the protocol's (RFC 9113 6.9.1)",
	"dataplane/http2.maxStreamID":          "the protocol's (RFC 9113 5.1.1)",
	"dataplane/hpack.huffMax":              "of the code (RFC 7541 Appendix B)",
	"sniff.maxFragment":                    "the protocol's (RFC 8446 5.1)",
}
