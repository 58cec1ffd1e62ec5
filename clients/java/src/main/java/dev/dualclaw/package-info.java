/**
 * The Java client of a dualclaw engine: it starts runs, follows them over lost connections without losing or doubling
 * an event, answers their questions, and writes events in the wire format of the contract.
 *
 * <p>Messages and stubs of the contract are in {@code dev.dualclaw.v1}. No argument may be null, and nothing returned
 * is.
 */
package dev.dualclaw;
